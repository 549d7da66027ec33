/*
 * rows_out.cuh - rows of an accumulator from registers to global memory, 16 bytes a lane.
 *
 * Before this header: HEAD_DIM, how many columns an accumulator has.
 */
#ifndef DHP_ROWS_OUT_CUH
#define DHP_ROWS_OUT_CUH

#include "ptx.cuh"

/* Lanes l and l ^ mask swap: the one whose bit is clear gives b and keeps a, the other gives a and keeps b. */
static __device__ __forceinline__ void swap_across(uint32_t *a, uint32_t *b, int bit_set, int mask) {
  const uint32_t got = __shfl_xor_sync(FULL_MASK, bit_set ? *a : *b, mask);
  *a = bit_set ? got : *a;
  *b = bit_set ? *b : got;
}

/*
 * Stores four blocks of eight columns of a row: the four lanes of a quad, which hold two columns of each, first
 * exchange them so that each has one block, then store 16 bytes each. `mask` is all ones, or 0 for a row of zeros;
 * `columns` is 0 for a row beyond the tensor.
 */
static __device__ __forceinline__ void store_four_blocks(char *out, const float2 *twos, int first, float factor,
                                                         uint32_t mask, int columns, int lane) {
  const int in_quad = lane % 4, block = first + in_quad;
  uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    x[i] = pack_two(twos[i].x * factor, twos[i].y * factor) & mask;
  swap_across(&x[0], &x[1], in_quad & 1, 1);
  swap_across(&x[2], &x[3], in_quad & 1, 1);
  swap_across(&x[0], &x[2], in_quad & 2, 2);
  swap_across(&x[1], &x[3], in_quad & 2, 2);
  store_four(block * 8 < columns, out + block * 16, x);
}

/* Stores this thread's row r of an accumulator. */
static __device__ __forceinline__ void store_row(char *out, const float *o, int r, float factor, uint32_t mask,
                                                 int columns, int lane) {
#pragma unroll
  for (int first = 0; first < HEAD_DIM / 8; first += 4) {
    float2 twos[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      twos[i] = {o[(first + i) * 4 + 2 * r], o[(first + i) * 4 + 2 * r + 1]};
    store_four_blocks(out, twos, first, factor, mask, columns, lane);
  }
}

#endif
