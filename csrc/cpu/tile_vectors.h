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

/* 16-bit to 32-bit lanes; named where the compiler would not find the one instruction for it. */
#if !defined(DHP_WIDEN_U16)
#define DHP_WIDEN_U16(halves) __builtin_convertvector(halves, dhp_ct_u32)
#endif

/* Written before the loops of a register block; clang-format would join nested ones, so it is off around them. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

DHP_CT lanes_f32 load(const void *from) {
  lanes_f32 x;
  memcpy(&x, from, sizeof x);
  return x;
}

DHP_CT void store(float *to, lanes_f32 x) { memcpy(to, &x, sizeof x); }

/*
 * The perfect shuffle of two vectors' first, and last, halves: a[0], b[0], a[1], b[1], ...; the indices of b's elements
 * follow those of a's.
 */
#if DHP_CT_LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LAST_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif DHP_CT_LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define LAST_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define LAST_HALVES 2, 6, 3, 7
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (dhp_ct_i32){__VA_ARGS__})
#endif

/* Rows become columns: each step doubles how many elements of a column lie side by side. */
DHP_CT void transpose(lanes_f32 x[LANES]) {
  UNROLL for (int done = 1; done < LANES; done *= 2) {
    lanes_f32 y[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      y[2 * i] = SHUFFLE(x[i], x[i + LANES / 2], FIRST_HALVES);
      y[2 * i + 1] = SHUFFLE(x[i], x[i + LANES / 2], LAST_HALVES);
    }
    UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
}

static int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

#endif
