/*
 * dq_out.cu - dq = scale * sums, from the integers that one_pass.cu added up to rows of the tensor.
 *
 * A thread makes eight neighbouring columns of two rows of a block, r and r + 8: they lie next to each other, in the
 * order of the lanes of a product. Integers have no NaN. So where an element of k is not finite, its column is NaN in
 * all rows that see the key, and in those that see another key of the same tile: a product multiplies tiles as a whole.
 *
 * CT: a sum only ever meets conversions and a multiplication, a unit a reciprocal; bits of columns meet masks and
 * public shifts. Addresses and predicates are functions of the thread, the block index and the parameters.
 */
#include "../../hopper/dq_format.h"
#include "../../hopper/ptx.cuh"
#include "../../hopper/row_bounds.cuh"
#include "params.h"

enum {
  EIGHT = 8,
  THREADS = WARPGROUPS * 128,
  WARPS = THREADS / 32,
  VECTORS = HEAD_DIM / EIGHT, /* of a row */
  TURNS = ROWS / 2 * VECTORS / THREADS,
  WORDS = HEAD_DIM / 32 /* of a bit for each column */
};

static_assert(ROWS / 2 * VECTORS % THREADS == 0 && ROWS % DQ_BLOCK_ROWS == 0, "rows share out evenly");

/* What a thread makes in a turn. */
typedef struct piece {
  int block, row; /* row: of the block, the first of two */
  int column;
} piece;

static __device__ __forceinline__ piece piece_of(int tile, int turn) {
  const int i = turn * THREADS + (int)threadIdx.x;
  const piece p = {tile * (ROWS / DQ_BLOCK_ROWS) + i / EIGHT / VECTORS, i % EIGHT, i / EIGHT % VECTORS * EIGHT};
  return p;
}

/* The tile of the last key that a query row sees; negative: it sees none. */
static __device__ __forceinline__ int last_tile(const dhp_dq_out_params *p, int row) {
  return (last_key_seen(row, p->causal_offset, p->seqlen_k) + KEYS_OF_TILE) / KEYS_OF_TILE - 1;
}

/* Of the tiles up to `last`, a bit for each column. */
static __device__ __forceinline__ void columns_up_to(uint32_t *columns, const uint32_t *of_tiles, int last) {
  __shared__ uint32_t of_warps[WARPS][WORDS];
  const int thread = (int)threadIdx.x;
  uint32_t found = 0;
#pragma unroll 1
  for (int tile = 0; tile <= last; tile += THREADS / WORDS) { /* the last one again is no harm */
    const int mine = min(tile + thread / WORDS, last);
    found |= of_tiles[mine * WORDS + thread % WORDS];
  }
#pragma unroll
  for (int step = WORDS; step < 32; step *= 2)
    found |= __shfl_xor_sync(FULL_MASK, found, step);
  of_warps[thread / 32][thread % WORDS] = found; /* lanes of the same word write the same */
  __syncthreads();
#pragma unroll
  for (int word = 0; word < WORDS; word++)
    columns[word] = of_warps[0][word] | of_warps[1][word] | of_warps[2][word] | of_warps[3][word];
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
dhp_attention_dq_out(const __grid_constant__ dhp_dq_out_params p) {
  static_assert(WARPS == 4, "columns_up_to adds up four");
  const int head_of_all = (int)blockIdx.x / p.tiles, tile = (int)blockIdx.x - head_of_all * p.tiles;
  const int batch = head_of_all / p.heads, head = head_of_all - batch * p.heads;
  const int key_head = head_of_all / p.heads_per_key_head; /* heads of a batch are whole groups */
  char *const dq = (char *)p.dq + 2 * (batch * p.dq_stride[0] + head * p.dq_stride[1]);
  const int32_t *const sums = p.sums + (int64_t)head_of_all * p.blocks * (DQ_BLOCK_ROWS * HEAD_DIM);
  const uint8_t *const units = p.units + (int64_t)head_of_all * p.seqlen_q;
  const uint32_t *const of_tiles = p.columns + (int64_t)key_head * p.key_tiles * WORDS;
  await_launches_before();
  begin_launches_after();

  const float failed = p.failed[key_head];
  int4 x[TURNS][4];
  uint32_t unit[TURNS][2], own[TURNS][2];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const piece at = piece_of(tile, turn);
    const int64_t block = (int64_t)(at.column / DQ_BLOCK_COLUMNS) * p.blocks + min(at.block, p.blocks - 1);
    const int4 *const from = (const int4 *)(sums + block * (DQ_BLOCK_ROWS * DQ_BLOCK_COLUMNS) +
                                            at.column % DQ_BLOCK_COLUMNS * DQ_BLOCK_ROWS) +
                             at.row * 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
      x[turn][i] = from[i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = min(at.block * DQ_BLOCK_ROWS + at.row + 8 * r, p.seqlen_q - 1), last = last_tile(&p, row);
      unit[turn][r] = units[row];
      own[turn][r] = of_tiles[max(last, 0) * WORDS + at.column / 32] & (last >= 0 ? ~0u : 0);
    }
  }
  uint32_t columns[WORDS];
  columns_up_to(columns, of_tiles, last_tile(&p, tile * ROWS));
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const piece at = piece_of(tile, turn);
    uint32_t of_all = columns[0];
#pragma unroll
    for (int word = 1; word < WORDS; word++)
      of_all = at.column / 32 == word ? columns[word] : of_all;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = at.block * DQ_BLOCK_ROWS + at.row + 8 * r;
      /* NAN_UNIT, 255, makes all columns NaN; else the unit's reciprocal is a normal number, 2^(127 - exponent). */
      const uint32_t all = 0u - (unit[turn][r] + 1 >> 8);
      const float factor = (p.scale + failed) * __uint_as_float((254u - unit[turn][r]) << 23);
      const uint32_t nan_columns = (of_all | own[turn][r]) >> at.column % 32 | all;
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int4 four = x[turn][i]; /* two columns of the first row, then of the second */
        const uint32_t nan = (0u - (nan_columns >> 2 * i & 1)) >> 16 | (0u - (nan_columns >> (2 * i + 1) & 1)) << 16;
        packed[i] = pack_two((float)(r ? four.z : four.x) * factor, (float)(r ? four.w : four.y) * factor);
        packed[i] = (packed[i] & ~nan) | (nan & 0x7fff7fffu);
      }
      store_four(row < p.seqlen_q && at.column < p.head_dim, dq + 2 * (row * p.dq_stride[2] + at.column), packed);
    }
  }
  end_together();
}
