/*
 * parts.cuh - rows that are not finished when a key segment ends: O, shift and sum of the segments so far, in device
 * memory, for this CTA's next segment of the same query tile, or for the fold family. Each element is written and read
 * by one thread. Before this header: the constants of the kernel.
 *
 * CT: addresses are functions of the thread, the block index and public parameters; parts are as secret as O.
 */
#ifndef DHP_FORWARD_PARTS_CUH
#define DHP_FORWARD_PARTS_CUH

#include "../../hopper/fold.cuh"
#include "../fold/params.h"
#include "../../hopper/rows_out.cuh"
#include "loads.cuh"

enum {
  TILE_ROWS = WARPGROUPS * ROWS,
  ROW_PIECES = HEAD_DIM / DHP_PART_COLUMNS, /* each four floats of this thread's */
  PIECES = ROW_PIECES * THREAD_ROWS,
  /* where S is under way, too; AHEAD of them, one or two, are asked for before the first is needed. As registers allow,
   * those of maps among them */
  GO_BATCH = HEAD_DIM > 128            ? 2
  : HEAD_DIM == 128 && WARPGROUPS == 1 ? 8
                                       : 4,
  AHEAD = HEAD_DIM == 128 && WARPGROUPS == 2 && !LISTED ? 2 : 1,
  BATCH = HEAD_DIM > 128 ? (WARPGROUPS == 1 || LISTED ? 2 : 4)
  : WARPGROUPS > 2       ? 4
                         : PIECES /* as registers allow */
};

static_assert(PIECES % GO_BATCH == 0 && PIECES % BATCH == 0 && PIECES >= AHEAD * GO_BATCH,
              "pieces come in whole batches");

/* A thread's first row of a query tile's place; its next one is eight further. */
static __device__ __forceinline__ int row_of_part(int place, int thread) {
  const int group = thread / WARPGROUP_THREADS, warp = thread / 32 % WARPS_PER_GROUP;
  return place * TILE_ROWS + group * ROWS + warp * (ROWS / WARPS_PER_GROUP) + thread % 32 / 4;
}

/* A thread's four floats of its first row, in the first columns. */
static __device__ __forceinline__ float *part_out(const kernel_params *p, int place, int thread) {
  const int row = row_of_part(0, thread);
  return p->part_out + ((int64_t)place * (TILE_ROWS * HEAD_DIM) + row * DHP_PART_COLUMNS + thread % 4 * 4);
}

/* All lanes of a quad store the same. */
static __device__ __forceinline__ float *part_sums(const kernel_params *p, int place, int thread) {
  return p->part_sums + (int64_t)row_of_part(place, thread) * 2;
}

/* Where a piece is from the first one; pieces are counted row after row. */
static __device__ __forceinline__ constexpr int offset_of_piece(int piece) {
  return (piece % ROW_PIECES * TILE_ROWS + piece / ROW_PIECES * 8) * DHP_PART_COLUMNS;
}

/* If go: a batch of this thread's pieces so far, from number `first` on; else 0. */
template <int count>
static __device__ __forceinline__ void load_pieces(int go, float (*before)[4], const float *out, int first) {
#pragma unroll
  for (int i = 0; i < count; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++)
      before[i][j] = 0.f;
    load_four_if(go, before[i], out + offset_of_piece(first + i));
  }
}

/*
 * A piece of O with what is so far folded in: two columns of each of two blocks of eight. O stays as it is: if it
 * changed on one path of the program only, its registers would have to be copied.
 */
static __device__ __forceinline__ void fold_piece(float *x, const float *o, int piece, const fold_weights *by,
                                                  const float *before) {
  const int r = piece / ROW_PIECES;
#pragma unroll
  for (int j = 0; j < 4; j++)
    x[j] = folded(before[j], o[piece % ROW_PIECES * 8 + j / 2 * 4 + 2 * r + j % 2], by[r]);
}

/* A batch of pieces becomes parts. */
template <int count>
static __device__ __forceinline__ void store_pieces(const float *o, const fold_weights *by, float (*before)[4],
                                                    float *out, int first) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    float x[4];
    fold_piece(x, o, first + i, by, before[i]);
    store_four(1, out + offset_of_piece(first + i), (const uint32_t *)x);
  }
}

/* Two pieces of one row, from number `first` on, become the output, as store_row makes it of O alone. */
static __device__ __forceinline__ void store_last_pieces(char *out, const float *o, int first, const fold_weights *by,
                                                         float (*before)[4], float factor, uint32_t mask, int columns,
                                                         int lane) {
  float x[2][4];
  fold_piece(x[0], o, first, by, before[0]);
  fold_piece(x[1], o, first + 1, by, before[1]);
  const float2 twos[4] = {{x[0][0], x[0][1]}, {x[0][2], x[0][3]}, {x[1][0], x[1][1]}, {x[1][2], x[1][3]}};
  store_four_blocks(out, twos, first % ROW_PIECES * 2, factor, mask, columns, lane);
}

#endif
