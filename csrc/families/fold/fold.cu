/*
 * fold.cu - rows whose key segments were the work of different CTAs or clusters: their parts, folded in the order in
 * which one CTA would have, become the output, with the same bits. A thread has four columns of a row, as a lane of a
 * quad holds them.
 *
 * CT: parts only ever meet what fold.cuh does with them, ex2, lg2, rcp, multiplications, additions, conversions and
 * masks by whether the row sees a key. Every address and predicate is a function of the thread, the block index and the
 * parameters.
 */
#include "../../hopper/divisor.cuh"
#include "params.h"

typedef dhp_fold_params kernel_params;

/* This uses the parameters. */
#include "../../hopper/fold.cuh"

enum {
  THREADS = WARPGROUPS * 128,
  QUAD = 4,
  PIECES = HEAD_DIM / DHP_PART_COLUMNS, /* of a row: for a quad, four floats each */
  BATCH = 4                             /* parts that are loaded at a time, before any of them is needed */
};

static_assert(THREADS == ROWS * QUAD * PIECES, "every thread has its columns");

/* A row of the output. */
typedef struct output_row {
  int batch, head, row;
} output_row;

/* The nth one of all; the last one beyond them. */
static __device__ __forceinline__ output_row row_of(const dhp_fold_params *p, int nth) {
  const int index = min(nth, p->rows - 1), of_all = quotient(index, p->by_seqlen_q);
  const int batch = quotient(of_all, p->by_heads);
  const output_row row = {batch, of_all - batch * p->heads, index - of_all * p->seqlen_q};
  return row;
}

/* Where a row has its part of a segment: in which place, for the first segment, and which row there. */
typedef struct part_row {
  int place, row;
} part_row;

static __device__ __forceinline__ part_row part_of(const dhp_fold_params *p, const output_row *x) {
  const int of_all = x->batch * p->heads + x->head, head_group = quotient(of_all, p->by_heads_per_group);
  const int head = of_all - head_group * p->heads_per_group;
  const int tile = quotient(x->row, p->by_tile_rows), in_tile = x->row - tile * p->tile_rows;
  const int group = in_tile >> p->log2_rows, in_group = in_tile & ((1 << p->log2_rows) - 1);
  const part_row part = {head_group * p->splits * p->q_tiles + p->q_tiles - 1 - tile,
                         group * p->group_rows + (head << p->log2_rows) + in_group};
  return part;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
dhp_attention_fold(const __grid_constant__ dhp_fold_params p) {
  const int in_quad = (int)threadIdx.x % QUAD, of_cta = (int)threadIdx.x / QUAD % ROWS;
  const int piece = (int)threadIdx.x / (QUAD * ROWS), nth = (int)blockIdx.x * ROWS + of_cta;
  const output_row row = row_of(&p, nth);
  const part_row part = part_of(&p, &row);
  const int in_place = (piece * p.place_rows + part.row) * DHP_PART_COLUMNS + in_quad * 4;
  await_launches_before();
  begin_launches_after();

  /* From the last segment to the first. */
  float out[4] = {0.f, 0.f, 0.f, 0.f}, shift = -p.highest_score, sum = 0.f;
#pragma unroll 1
  for (int last = p.splits - 1; last >= 0; last -= BATCH) {
    float of_out[BATCH][4];
    float2 of_sums[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int64_t place = part.place + (int64_t)max(last - i, 0) * p.q_tiles;
      of_sums[i] = {-p.highest_score, 0.f};
      load_two_if(last - i >= 0, &of_sums[i], p.part_sums + (place * p.place_rows + part.row) * 2);
#pragma unroll
      for (int j = 0; j < 4; j++)
        of_out[i][j] = 0.f;
      load_four_if(last - i >= 0, of_out[i], p.part_out + (place * p.place_rows * HEAD_DIM + in_place));
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const float shift_before = shift, sum_before = sum;
      shift = of_sums[i].x;
      sum = of_sums[i].y;
      const fold_weights by = fold_sums(&shift, &sum, shift_before, sum_before, &p);
#pragma unroll
      for (int j = 0; j < 4; j++)
        out[j] = folded(out[j], of_out[i][j], by);
    }
  }

  const int last_key = min(row.row + p.highest, p.seqlen_k - 1), exists = nth < p.rows;
  const uint32_t seen = (uint32_t)(last_key < 0) - 1; /* a row that sees no key is 0 */
  const float factor = dhp_ct_reciprocal(sum), lse = dhp_ct_log(sum) + shift * p.scale;
  const int column = piece * DHP_PART_COLUMNS + in_quad * 2;
  char *const to = (char *)p.out +
                   2 * (row.batch * p.out_stride[0] + row.head * p.out_stride[1] + row.row * p.out_stride[2] + column);
  store_word(exists && column < p.head_dim, (uint32_t *)to, pack_two(out[0] * factor, out[1] * factor) & seen);
  store_word(exists && column + 8 < p.head_dim, (uint32_t *)(to + 16),
             pack_two(out[2] * factor, out[3] * factor) & seen);
  store_one(exists && p.lse != 0 && piece == 0 && in_quad == 0,
            p.lse + ((int64_t)row.batch * p.heads + row.head) * p.seqlen_q + row.row, last_key < 0 ? -INFINITY : lse);
  end_together();
}
