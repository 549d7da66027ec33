/* params.h - what the host and the kernel of bounds agree on. All public. */
#ifndef DHP_BOUNDS_PARAMS_H
#define DHP_BOUNDS_PARAMS_H

#include <stdint.h>

/*
 * Of key j, two floats: log2 of the norm of v_j, log2 of the largest |element| of k_j. Zeros: -inf. bounds is
 * [batch key heads][tiles][rows of a CTA][2]: the maxima over the keys of j's tile up to and with j, so that the last
 * of a tile has those of the whole tile. Keys past the end count as zeros. Of v, a NaN makes NaN; of k, elements that
 * are not finite count as zeros, and columns is [batch key heads][tiles][head_dim / 32]: of the whole tile a bit for
 * each column of k, 1 if one of its elements is not finite.
 */
typedef struct dhp_bounds_params {
  const void *k, *v;                /* [batch, heads, seqlen_k, head_dim], 16-byte aligned rows */
  int64_t k_stride[3], v_stride[3]; /* of batch, head and row, in elements */
  float *bounds;
  uint32_t *columns;
  int32_t heads, seqlen_k, head_dim; /* heads: of keys; seqlen_k: at least 1 */
  int32_t tiles;                     /* of one head: CTAs */
} dhp_bounds_params;

/* The two floats of each key of a CTA, and of each warp a bit for each column. A macro of all families has these
 * parameters. */
#define DHP_BOUNDS_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages) \
  ((rows) * 8 + (warpgroups) * 4 * (head_dim) / 8)

#endif
