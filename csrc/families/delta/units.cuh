/*
 * units.cuh - of each query row the unit factor of its dq, and what one_pass.cu finds in the sums: zeros.
 *
 * one_pass.cu adds up round(x * unit) of shares x of dq / scale = sum_j P_j (dP_j - delta) k_j, as int32. P adds up to
 * 1, and |dP_j| <= |grad_out| |v_j|, so that over the keys that the row sees
 *
 *     |dq / scale| <= 2 max(|grad_out| max |v_j|, |delta|) max |k_jc|,
 *
 * every partial sum too. The unit is the power of two that brings this just below 2^30. Between that and the 2^31 of
 * int32 there is room for the rounding of each share.
 *
 * A row is NaN whose bound is NaN or too large for the arithmetic of one_pass.cu, or whose lse is: integers have none.
 * Of k only finite elements count: of the others dq_out makes NaN columns.
 */
#ifndef DHP_DELTA_UNITS_CUH
#define DHP_DELTA_UNITS_CUH

#include "../../hopper/dq_format.h"
#include "../../hopper/row_bounds.cuh"
#include "params.h"

enum {
  OCTET = DQ_BLOCK_ROWS / 2, /* query rows: half a block of the sums */
  OCTET_INTEGERS = OCTET * DQ_BLOCK_COLUMNS
};

static_assert(OCTET_INTEGERS * 4 == WARPGROUPS * 128 * 16 && ROWS % OCTET == 0, "a CTA clears octets, each at once");
static_assert(ROWS % DQ_BLOCK_ROWS == 0, "and all of the blocks of its rows, which are two octets each");

/*
 * log2 of the largest norm of v and of the largest |element| of k, over the keys up to `last` >= 0. All rows of the CTA
 * see the keys up to `common` >= 0, and less than a tile more.
 */
static __device__ __forceinline__ float2 bounds_up_to(const dhp_delta_params *p, int key_head, int common, int last,
                                                      int lane) {
  const float2 *const bounds = (const float2 *)p->bounds + (int64_t)key_head * p->key_tiles * KEYS_OF_TILE;
  const int tiles = common / KEYS_OF_TILE;
  /* Its own tile up to it; and the whole tile before, or, if there is none, a key that it sees in any case. */
  const float2 own = max_or_nan(bounds[last], bounds[max(last / KEYS_OF_TILE * KEYS_OF_TILE - 1, 0)]);
  float2 most = bounds[0];
#pragma unroll 1
  for (int first = 0; first < tiles; first += 4 * 32) {
#pragma unroll
    for (int i = 0; i < 4; i++) { /* the last one again is no harm */
      const int tile = min(first + i * 32 + lane, tiles - 1);
      most = max_or_nan(most, bounds[(int64_t)tile * KEYS_OF_TILE + KEYS_OF_TILE - 1]);
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    most = max_or_nan(most,
                      make_float2(__shfl_xor_sync(FULL_MASK, most.x, step), __shfl_xor_sync(FULL_MASK, most.y, step)));
  return max_or_nan(own, most);
}

/* The unit's biased exponent, or NAN_UNIT. log2_grad: of the norm of the row of grad_out; lse: in base 2, finite or
 * NaN. */
static __device__ __forceinline__ uint32_t unit_of(float log2_grad, float delta, float lse, float2 keys) {
  /*
   * P, dS, and these logarithms are rounded: dS to 2^-9 if it is a bfloat16, P to some 2^-23 |lse|. 2^(1/64) is 1.011.
   * For an lse beyond 2^15 there still is the room up to 2^31.
   */
  const float slack = 1.f / 64;
  /* Below the smallest normal number rounding errors do not shrink any more, nor does the logarithm see it. */
  const float smallest = -126.f;
  const float of_ds = max_or_nan(max_or_nan(log2_grad + keys.x, dhp_ct_log2(fabsf(delta))), smallest) + (1.f + slack);
  const float of_dq = of_ds + keys.y + lse * 0.f;
  /* 126: then the factor's reciprocal is a normal number, too. */
  const int exponent = min(__float2int_rd(30.f - of_dq), 126);
  /* float32 ends at 2^128, and an Inf would be the largest integer. A dq whose bound is that loose still has a unit. */
  const uint32_t fits = dhp_ct_less(of_ds, 128.f) & dhp_ct_less(of_dq, 150.f);
  const uint32_t biased = (uint32_t)(exponent + 127);
  return (biased & fits) | (NAN_UNIT & ~fits);
}

/* Zeros to the sums of the CTA's rows, and to `failed` of its key head, from its first query head's first CTA. */
static __device__ __forceinline__ void clear_sums(const dhp_delta_params *p, int head_of_all, int tile) {
  enum { BOXES = HEAD_DIM / DQ_BLOCK_COLUMNS };
  const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < BOXES * (ROWS / OCTET); i++) {
    const int box = i / (ROWS / OCTET), octet = tile * (ROWS / OCTET) + i % (ROWS / OCTET);
    int32_t *const to = p->sums + (((int64_t)head_of_all * BOXES + box) * (2 * p->blocks) + octet) * OCTET_INTEGERS;
    store_four(octet < 2 * p->blocks, to + threadIdx.x * 4, zeros);
  }
  const int key_head = head_of_all / p->heads_per_key_head;
  const int first = tile == 0 && head_of_all == key_head * p->heads_per_key_head;
  store_one(p->blocks > 0 && first && threadIdx.x == 0, p->failed + key_head, 0.f);
}

#endif
