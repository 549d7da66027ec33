/* params.h - what the host and the kernel of dq_out agree on. All public. */
#ifndef DHP_DQ_OUT_PARAMS_H
#define DHP_DQ_OUT_PARAMS_H

#include <stdint.h>

/*
 * sums is [batch heads][head_dim / 64][blocks][8 octets of columns][32 lanes][4]: a block is what a warp holds of a
 * product's accumulator, sixteen query rows and 64 columns of head_dim, in the order in which its lanes hold it (PTX
 * ISA 9.0, 9.7.15.5.1.1, matrix D).
 */
typedef struct dhp_dq_out_params {
  const int32_t *sums;
  const uint8_t *units;    /* see ../delta/params.h */
  const float *failed;     /* [batch key heads]: 0, or NaN if the sums are wrong */
  const uint32_t *columns; /* see ../bounds/params.h */
  void *dq;                /* [batch, heads, seqlen_q, head_dim], 16-byte aligned rows */
  int64_t dq_stride[3];    /* of batch, head and row, in elements */
  int32_t heads, heads_per_key_head, seqlen_q, head_dim;
  int32_t blocks, tiles;                      /* of one head: groups of sixteen rows; CTAs */
  int32_t seqlen_k, causal_offset, key_tiles; /* offset in [-seqlen_q, seqlen_k]; key_tiles: of one head, of bounds */
  float scale;
} dhp_dq_out_params;

/* No shared memory; a macro of all families has these parameters. */
#define DHP_DQ_OUT_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages) 0

#endif
