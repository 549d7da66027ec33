/* params.h - what the host and the kernel of fold agree on. All public but what the pointers lead to. */
#ifndef DHP_FOLD_PARAMS_H
#define DHP_FOLD_PARAMS_H

#include <stdint.h>

#include "../../hopper/divisor.h"
#include "../../hopper/softmax_params.h"

/*
 * Parts lie in places of place_rows, one for each item of the launch that made them: all key segments of a head group,
 * in each of them its query tiles from the last one to the first. In a place, those of a warpgroup stand together, and
 * of these 2^log2_rows query rows of one head; see ../forward/params.h.
 *
 * part_out is [places][head_dim / 16][place_rows][4][4]: of 16 columns a lane of a quad has what it holds of a
 * product's accumulator, two columns of each eight (PTX ISA 9.0, 9.7.15.5.1.1, matrix D); so a warp's floats are
 * neighbours. part_sums is [places][place_rows][2], shift and sum.
 */
enum {
  DHP_PART_COLUMNS = 16,
  /* A CTA whose rows see no key of its segment still visits a key tile: one so many tiles further on, where TMA reads
   * zeros. Only fewer key tiles than that are split, so there are no keys. */
  DHP_NOT_SEEN_TILES = 1 << 22
};

typedef struct dhp_fold_params {
  const float *part_out, *part_sums;
  void *out;             /* [batch, heads, seqlen_q, head_dim], 16-byte aligned rows */
  int64_t out_stride[3]; /* of batch, head and row, in elements */
  float *lse;            /* [batch, heads, seqlen_q] or null */
  int32_t heads, seqlen_q, seqlen_k, head_dim;
  int32_t highest;                    /* query i sees keys up to i + highest */
  int32_t rows;                       /* of all batches and heads */
  int32_t splits;                     /* key segments */
  int32_t place_rows, group_rows;     /* of a place, of a warpgroup */
  int32_t log2_rows, q_tiles;         /* q_tiles: of one head group */
  int32_t heads_per_group, tile_rows; /* rows of one head in a query tile */
  dhp_divisor by_seqlen_q, by_heads, by_tile_rows;
  dhp_divisor by_heads_per_group;
  DHP_SOFTMAX_PARAMS
} dhp_fold_params;

/* No shared memory; a macro of all families has these parameters. */
#define DHP_FOLD_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages) 0

#endif
