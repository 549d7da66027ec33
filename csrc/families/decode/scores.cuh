/*
 * scores.cuh - S = q k^T of a warp's key tiles, box by box, and the way of k into its place. Before this header: the
 * constants of the kernel.
 */
#ifndef DHP_DECODE_SCORES_CUH
#define DHP_DECODE_SCORES_CUH

#include "unit.cuh"

/* Asks for the nth box of k of this warp. Where there is no such tile its mbarrier completes all the same. */
static __device__ __forceinline__ void load_keys(int go, int nth, const unit *u, int warp, const CUtensorMap *map,
                                                 uint32_t base) {
  const int tile = tile_of_warp(u, warp, nth / BOXES), there = tile < u->tiles;
  const uint32_t full = base + SHARED_BARRIERS + K_FULL + 8 * (warp * K_LOADS + nth);
  mbarrier_arrive_expect_tx(go, full, there ? BOX_BYTES : 0);
  tma_load(go && there, base + SHARED_BOXES + warp * BOX_BYTES, map, full, nth % BOXES * K_COLUMNS, first_key(u, tile),
           u->key_head, u->batch);
}

/*
 * This thread's row of q as the operand a of mma: two registers for 16 columns, two columns from 2 (lane % 4) on and
 * two from 8 later on. A row beyond the tensor is its last one, and not stored; a column beyond it is 0.
 */
static __device__ __forceinline__ void hold_queries(uint32_t *q, const dhp_decode_params *p, int batch, int head,
                                                    int row, int lane) {
  const char *const of_row = (const char *)p->q + 2 * (batch * p->q_stride[0] + head * p->q_stride[1] +
                                                       min(row, p->seqlen_q - 1) * p->q_stride[2]);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++) {
    const int column = 8 * i + lane % 4 * 2;
    q[i] = *(const uint32_t *)(of_row + 2 * min(column, p->head_dim - 2)) & (uint32_t)(column - p->head_dim >> 31);
  }
}

enum { BLOCKS = TILE_K / 8 /* of eight keys */ };

/*
 * S += q k^T over the columns of one box, 16 at a time in ascending order; q from these columns on. The swizzle
 * exchanges the 16-byte pieces of a row by the bits of an address that count 128 bytes.
 */
static __device__ __forceinline__ void multiply_keys(float *s, const uint32_t *q, uint32_t box, int lane) {
  const int row = lane % 8;
#pragma unroll
  for (int part = 0; part < K_COLUMNS / 32; part++) {
    const uint32_t from = box + row * K_ROW_BYTES + 16 * ((part * 4 + lane / 8) ^ row * K_ROW_BYTES / 128);
#pragma unroll
    for (int first = 0; first < BLOCKS; first += BLOCKS / 2) { /* half of the blocks: products that await nobody */
      uint32_t k[BLOCKS / 2][4];
#pragma unroll
      for (int i = 0; i < BLOCKS / 2; i++)
        load_matrices(k[i], from + (first + i) * 8 * K_ROW_BYTES);
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int i = 0; i < BLOCKS / 2; i++)
          multiply_eight_rows(s + 4 * (first + i), q + 4 * part + 2 * step, k[i] + 2 * step);
    }
  }
}

#endif
