/*
 * scores.cuh - from S and dP, tiles in registers, to P and dS.
 *
 * Accumulators of products are read here and never written: ptxas would take them for defined by other instructions
 * while products are under way, and run the products one by one.
 *
 * CT: scores meet fused multiply-adds, ex2, multiplications and selects by public positions.
 */
#ifndef DHP_BACKWARD_SCORES_CUH
#define DHP_BACKWARD_SCORES_CUH

#include "../../ct.h"
#include "layout.cuh"

/*
 * What the queries of a tile bring along: lse in base 2, and delta. Owned queries are this thread's two rows, walked
 * ones its columns, two of each block of eight: their statistics lie in shared memory, every fourth group of four.
 */
typedef struct of_queries {
  const float4 *walked;
  float lse[2], delta[2];
} of_queries;

/* Of the accumulator's element i: its row of the thread's two, and its column, counted from the thread's first. */
static __device__ __forceinline__ int row_of(int i) { return i / 2 % 2; }
static __device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + i % 2; }

/* limit[r]: the last column that owned query r sees, or the first that sees owned key r. */
static __device__ __forceinline__ int is_seen(const int *limit, int i) {
  return OWNS_KEYS ? column_of(i) >= limit[row_of(i)] : column_of(i) <= limit[row_of(i)];
}

/* P = exp2(scale_log2 S - lse), 0 where masked. */
static __device__ __forceinline__ void probabilities(float *p, const float *s, const of_queries *q, float scale_log2,
                                                     const int *limit, int masked) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    const float walked = i % 2 ? q->walked[i / 4 * 4].y : q->walked[i / 4 * 4].x;
    const float x = dhp_ct_exp2(fmaf(s[i], scale_log2, -(OWNS_KEYS ? walked : q->lse[row_of(i)])));
    p[i] = !masked || is_seen(limit, i) ? x : 0.f;
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
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    const float walked = i % 2 ? q->walked[i / 4 * 4].w : q->walked[i / 4 * 4].z;
    const float x = p[i] * (dp[i] - (OWNS_KEYS ? walked : q->delta[row_of(i)]));
    ds[i] = !masked || is_seen(limit, i) ? x : 0.f;
  }
  pack(packed, ds);
}

#endif
