/*
 * scores.cuh - S and dP, tiles in registers, and from them P and dS. Before this header: wgmma.h.
 *
 * P takes the place of S: accumulators are defined anew in each step (products.cuh). Others could only be read here:
 * ptxas would take them for defined by other instructions while products are under way, and run the products one by
 * one.
 *
 * CT: scores meet fused multiply-adds, ex2, multiplications and selects by public positions.
 */
#ifndef DHP_BACKWARD_SCORES_CUH
#define DHP_BACKWARD_SCORES_CUH

#include "../../ct.h"
#include "../../hopper/products.cuh"
#include "layout.cuh"

enum {
  PAIRS = SCORES / 4,     /* of a thread's columns: two of each block of eight */
  STATISTICS_OF_PAIR = 16 /* bytes: lse of both, delta of both */
};

/* d = own walk^T, over head_dim: S or dP. */
static __device__ __forceinline__ void issue_scores(float *d, uint32_t own, uint32_t walk) {
  issue_shared_fresh<wgmma_scores_fresh, wgmma_scores>(d, own, OWN_BOX_BYTES, walk, WALK_BOX_BYTES, HEAD_DIM);
}

/* From one pair of this thread's to the next, in shared memory: the other three of the quad have theirs between. */
enum { PAIR_BYTES = 4 * STATISTICS_OF_PAIR };

/*
 * What the queries of a tile bring along: lse in base 2, and delta. Owned queries are this thread's two rows. Walked
 * ones are its columns: their statistics lie in shared memory, at `walked`, and those of the first AHEAD pairs, and all
 * lse if there are any, are in registers already.
 */
typedef struct of_queries {
  uint32_t walked;
  const float2 *lse_ahead, *delta_ahead;
  float lse[2], delta[2];
} of_queries;

/* Of the accumulator's element i: its row of the thread's two, and its column, counted from the thread's first. */
static __device__ __forceinline__ int row_of(int i) { return i / 2 % 2; }
static __device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + i % 2; }

/* limit[r]: the last column that owned query r sees, or the first that sees owned key r. */
static __device__ __forceinline__ int is_seen(const int *limit, int i) {
  return OWNS_KEYS ? column_of(i) >= limit[row_of(i)] : column_of(i) <= limit[row_of(i)];
}

/* Of `pairs` of this thread's columns, lse or delta. */
enum statistic { LSE = 0, DELTA = 8 };
static __device__ __forceinline__ void load_statistics(float2 *to, uint32_t walked, int which, int pairs) {
#pragma unroll
  for (int i = 0; i < pairs; i++)
    to[i] = load_shared_two(walked + i * PAIR_BYTES + which);
}

/* P = exp2(scale_log2 S - lse), 0 where masked, in place. */
static __device__ __forceinline__ void probabilities(float *s, const of_queries *q, float scale_log2, const int *limit,
                                                     int masked) {
  float2 lse = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    if (OWNS_KEYS && i % 4 == 0)
      lse = AHEAD ? q->lse_ahead[i / 4] : load_shared_two(q->walked + i / 4 * PAIR_BYTES + LSE);
    const float x = dhp_ct_exp2(fmaf(s[i], scale_log2, -(OWNS_KEYS ? i % 2 ? lse.y : lse.x : q->lse[row_of(i)])));
    s[i] = !masked || is_seen(limit, i) ? x : 0.f;
  }
}

static __device__ __forceinline__ void pack(uint32_t *packed, const float *x) {
#pragma unroll
  for (int i = 0; i < SCORES; i += 2)
    packed[i / 2] = pack_two(x[i], x[i + 1]);
}

/* dS = P (dP - delta), 0 where masked, even if that is NaN; packed. */
static __device__ __forceinline__ void score_gradients(uint32_t *packed, const float *p, const float *dp,
                                                       const of_queries *q, const int *limit, int masked) {
  float ds[SCORES];
  float2 delta = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    if (OWNS_KEYS && i % 4 == 0)
      delta = i / 4 < AHEAD ? q->delta_ahead[i / 4] : load_shared_two(q->walked + i / 4 * PAIR_BYTES + DELTA);
    const float x = p[i] * (dp[i] - (OWNS_KEYS ? i % 2 ? delta.y : delta.x : q->delta[row_of(i)]));
    ds[i] = !masked || is_seen(limit, i) ? x : 0.f;
  }
  pack(packed, ds);
}

#endif
