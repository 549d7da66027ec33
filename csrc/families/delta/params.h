/* params.h - what the host and the kernel of delta agree on. All public. */
#ifndef DHP_DELTA_PARAMS_H
#define DHP_DELTA_PARAMS_H

#include <stdint.h>

/*
 * statistics is [batch heads][pairs][4]: for each two query rows their lse in base 2, then their deltas, in the order
 * in which the backward reads them. Of an odd number of rows the last one's neighbour is written as 0.
 *
 * With blocks, units is [batch heads][seqlen_q]: how many units of its sums are 1, of each query row; as the exponent
 * of a float, a byte (../../hopper/dq_format.h). NAN_UNIT of a row whose dq is NaN; ONE_UNIT of one that sees no key.
 * sums and failed (../dq_out/params.h) get zeros.
 */
typedef struct dhp_delta_params {
  const void *out, *grad_out;                /* [batch, heads, seqlen_q, head_dim], 16-byte aligned rows */
  int64_t out_stride[3], grad_out_stride[3]; /* of batch, head and row, in elements */
  const float *lse, *grad_lse;               /* [batch, heads, seqlen_q]; grad_lse: any floats if has_grad_lse is 0 */
  float *statistics;
  const float *bounds; /* see ../bounds/params.h; without blocks, any 8 bytes */
  uint8_t *units;
  float *failed;
  int32_t *sums;
  int32_t heads, seqlen_q, head_dim;
  int32_t pairs, tiles;                                /* of one head: pairs of rows; CTAs */
  uint32_t has_grad_lse;                               /* all ones, or 0 */
  int32_t heads_per_key_head, seqlen_k, causal_offset; /* offset in [-seqlen_q, seqlen_k]; seqlen_k: at least 1 */
  int32_t key_tiles;                                   /* of one head: tiles of bounds */
  int32_t blocks;                                      /* of one head: of sixteen query rows; 0: no units are wanted */
} dhp_delta_params;

/* No shared memory; a macro of all families has these parameters. */
#define DHP_DELTA_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages) 0

#endif
