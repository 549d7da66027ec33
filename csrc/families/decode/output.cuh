/*
 * output.cuh - O += P v over the key tiles of a unit, one after another: eight columns a warp, in its CTA's strip of v;
 * and the way of these strips into the places of k. Before this header: the constants of the kernel.
 */
#ifndef DHP_DECODE_OUTPUT_CUH
#define DHP_DECODE_OUTPUT_CUH

#include "../../ct.h"
#include "../fold/params.h"
#include "unit.cuh"

/* The place of a tile's strip of v. */
static __device__ __forceinline__ uint32_t strip_of(uint32_t base, int tile) {
  return base + SHARED_BOXES + (uint32_t)tile % (STAGES * GROUP) * STRIP_BYTES;
}

/* Asks for the strips of `count` tiles of one group, from `first` on; those that there are. */
static __device__ __forceinline__ void load_strips(int go, int first, int count, const unit *u, const CUtensorMap *map,
                                                   uint32_t base) {
  const uint32_t full = group_full(base, first);
  const int there = min(max(u->tiles - first, 0), count);
  mbarrier_arrive_expect_tx(go, full, there * STRIP_BYTES);
#pragma unroll
  for (int i = 0; i < count; i++)
    tma_load(go && i < there, strip_of(base, first + i), map, full, u->rank * STRIP, first_key(u, first + i),
             u->key_head, u->batch);
}

/* What a warp needs of a tile. */
typedef struct operands {
  uint32_t p[2 * STEPS], v[2 * STEPS]; /* of 16 keys two registers each */
  float2 lane;                         /* what rescales the sums before, and the tile's sum of this thread's columns */
} operands;

/* Lane i reads key i of 32, eight columns. The swizzle: as of k (scores.cuh). */
static __device__ __forceinline__ void fetch(operands *x, int tile, uint32_t base, int warp, int lane) {
  const uint32_t v = strip_of(base, tile) + lane * STRIP_ROW_BYTES +
                     16 * (warp ^ lane * STRIP_ROW_BYTES / 128 % (STRIP_ROW_BYTES / 16));
  const uint32_t of_lane = share_of(base, tile) + lane * 8;
#pragma unroll
  for (int step = 0; step + 1 < STEPS; step += 2)
    load_matrices_transposed(x->v + 2 * step, v + step * 16 * STRIP_ROW_BYTES);
  if (STEPS % 2) load_two_matrices_transposed(x->v + 2 * (STEPS - 1), v + (STEPS - 1) * 16 * STRIP_ROW_BYTES);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const float2 two = load_shared_two(of_lane + step * STEP_BYTES);
    x->p[2 * step] = __float_as_uint(two.x);
    x->p[2 * step + 1] = __float_as_uint(two.y);
  }
  x->lane = load_shared_two(of_lane + P_BYTES);
}

/* O and sum move on by a tile; if there is none, they stay as they are. */
static __device__ __forceinline__ void multiply_values(float *o, float *sum, const operands *x, int there) {
  float next[OUTPUTS] = {o[0] * x->lane.x, o[1] * x->lane.x, 0.f, 0.f};
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    multiply_eight_rows(next, x->p + 2 * step, x->v + 2 * step);
  const uint32_t mask = DHP_CT_MASK(there);
  o[0] = dhp_ct_select(mask, next[0], o[0]);
  o[1] = dhp_ct_select(mask, next[1], o[1]);
  *sum = dhp_ct_select(mask, fmaf(*sum, x->lane.x, x->lane.y), *sum);
}

/* Where two columns of a row, an even one and the next, are in a unit's place, counted in floats. */
static __device__ __forceinline__ int offset_in_place(int row, int column) {
  const int in_quad = column / 2 % 4, second = column / 8 % 2;
  return (column / DHP_PART_COLUMNS * ROWS + row) * DHP_PART_COLUMNS + in_quad * 4 + second * 2;
}

#endif
