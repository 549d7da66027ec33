/*
 * params.h - what the host and the decode kernel agree on: the launch parameters and the shared memory plan.
 *
 * Read by the family's host code and by its kernel; one kernel is one choice of the constants in family.py.
 */
#ifndef DHP_DECODE_PARAMS_H
#define DHP_DECODE_PARAMS_H

#include <stdint.h>

#include "../../hopper/divisor.h"
#include "../../hopper/softmax_params.h"

enum {
  DHP_DECODE_ALIGN = 1024, /* the 128-byte swizzle repeats every 1024 bytes; CUDA aligns shared memory to 16 */
  DHP_DECODE_ROWS = 8      /* query rows of a cluster */
};

/*
 * All public: shape, strides, flags, and where the results go. k and v travel as tensor maps.
 *
 * The rows of a cluster are 2^log2_rows query rows of each of as many heads as that leaves, a head group, which share a
 * key head; the head varies slowest.
 */
typedef struct dhp_decode_params {
  const void *q;                      /* [batch, heads, seqlen_q, head_dim], 16-byte aligned rows */
  void *out;                          /* likewise */
  int64_t q_stride[3], out_stride[3]; /* of batch, head and row, in elements */
  float *lse;                         /* [batch, heads, seqlen_q] or null */
  int32_t heads;
  int32_t seqlen_q, seqlen_k, head_dim;
  int32_t highest;                /* query i sees keys up to i + highest, which is in [-seqlen_q, keys] */
  float *part_out, *part_sums;    /* as in ../fold/params.h, of eight rows a place; if splits > 1, in place of out */
  int32_t splits;                 /* key segments that are units of their own; 1: none */
  int32_t log2_rows, head_groups; /* head_groups: of one batch, splits times each */
  int32_t q_tiles;                /* of one head group */
  dhp_divisor by_q_tiles, by_head_groups, by_splits, by_heads_per_key_head;
  DHP_SOFTMAX_PARAMS
  uint32_t zero; /* 0, which the compiler must not know: see DEFINE_WAIT in ptx.cuh */
} dhp_decode_params;

/* Columns of a box of k: of each warp one, whose places all together hold four strips of v a stage. */
#define DHP_DECODE_BOX_COLUMNS(warpgroups, stages, strip) ((stages) * (strip) / (warpgroups))

/*
 * Dynamic shared memory of one CTA in bytes, whose strip of v is `strip` columns wide. Of each warp a box of k, whose
 * place then holds strips of v; of each key tile of a cluster the packed probabilities, two floats a lane, and a
 * maximum a row; a word of each warp of the cluster; and mbarriers. A macro because it initialises a constant table.
 */
#define DHP_DECODE_TILES(head_dim, warpgroups, tiles, strip) ((head_dim) / (strip) * (warpgroups) * 4 * (tiles))
#define DHP_DECODE_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages, tiles, strip)  \
  (DHP_DECODE_ALIGN + (stages) * 4 * (tile_k) * 2 * (strip) +                              \
   DHP_DECODE_TILES(head_dim, warpgroups, tiles, strip) * ((tile_k) * 16 + 256 + 32 + 2) + \
   (head_dim) / (strip) * (warpgroups) * 16 +                                              \
   8 * (warpgroups) * 4 * (tiles) * ((head_dim) / DHP_DECODE_BOX_COLUMNS(warpgroups, stages, strip)) + 16)

#endif
