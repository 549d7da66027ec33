/*
 * tile_vectors.h - the vectors of the instruction set that a tile_*.c names, and how loops over them are unrolled.
 */
#ifndef DHP_CPU_TILE_VECTORS_H
#define DHP_CPU_TILE_VECTORS_H

#include <string.h>

#include "../ct.h"
#include "convert.h"
#include "tile.h"

enum {
  LANES = DHP_CT_LANES,
  SCORE_KEYS = DHP_SCORE_KEYS,
  SCORE_VECTORS = DHP_SCORE_VECTORS,
  VALUE_ROWS = DHP_VALUE_ROWS,
  VALUE_VECTORS = DHP_VALUE_VECTORS
};

typedef dhp_ct_f32 lanes_f32;
typedef uint16_t lanes_u16 __attribute__((vector_size(DHP_CT_LANES * 2)));

/* Written before the loops of a register block; clang-format would join nested ones, so it is off around them. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

DHP_CT lanes_f32 load(const float *from) {
  lanes_f32 x;
  memcpy(&x, from, sizeof x);
  return x;
}

DHP_CT void store(float *to, lanes_f32 x) { memcpy(to, &x, sizeof x); }

static int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

#endif
