/*
 * tile_impl.h - the tile kernel: FlashAttention's online softmax (Dao et al., 2022) with queries in the vector lanes.
 *
 * Included once per instruction set by a tile_*.c that defines
 *   DHP_CT_LANES, DHP_CT_FMA             floats in a vector register, and their multiply-add if there is one (ct.h),
 *   DHP_CT_MAX, DHP_CT_MIN               as ct.h has them, if there are any,
 *   DHP_WIDEN_U16                        the instruction from 16-bit to 32-bit lanes, if there is one,
 *   DHP_SCORE_KEYS, DHP_SCORE_VECTORS    the register block of scores: keys (a divisor of DHP_CPU_TILE_K) and vectors,
 *   DHP_VALUE_ROWS, DHP_VALUE_VECTORS    the register block of p v: query rows and vectors,
 *   DHP_CPU_KERNEL, DHP_INSTRUCTIONS     the name of the kernel in C, and in words.
 *
 * Scores are computed as S^T = K Q^T, a vector of queries times one element of k: what belongs to one query stays in
 * one lane from its scores to its sum, in an order that depends on the key index alone. So there is no reduction across
 * lanes, and a row's bits do not depend on its neighbours. For O += P V the lanes hold d.
 *
 * The chain is one over the keys of a segment, and a row the fold of these (tile_segments.h).
 *
 * A score or value that a row may not see is kept out by public bounds: its p is never multiplied with its v (0 * NaN
 * is NaN).
 */
#include "tile_few.h"
#include "tile_rows.h"
#include "tile_scores.h"
#include "tile_segments.h"
#include "tile_softcap.h"
#include "tile_values.h"
#include "backward/tile_sinks.h"

/* out / sum and lse. Rows that see no key (public) get 0 and -inf, or the sink. */
static void write_results(const dhp_cpu_rows *rows, const dhp_key_range seen[DHP_CPU_TILE_Q], int queries,
                          dhp_cpu_scratch *scratch) {
  const dhp_attention *const args = rows->args;
  const dhp_tensor *const out = &args->out;
  const lanes_f32 ln2 = dhp_ct_splat(0.69314718f);
  for (int query = 0; query < queries; query += LANES) {
    const lanes_f32 sum = load(&scratch->sum[query]);
    const lanes_f32 lse = dhp_ct_fma(shift_of(load(&scratch->maximum[query])), ln2, dhp_ct_log(sum));
    store(&scratch->lse[query], dhp_ct_canonical(lse));
    store(&scratch->rescale[query], dhp_ct_reciprocal(sum)); /* of a zero sum: inf, and 0 * inf is the NaN of 0 / 0 */
  }
  for (int i = 0; i < rows->count; i++) {
    char *const row = row_pointer(out, rows->batch, head_of(rows, i), position_of(rows, i));
    if (seen[i].first == seen[i].last) {
      memset(row, 0, (size_t)out->size[3] * element_size(out->dtype));
      if (!args->sinks) scratch->lse[i] = -__builtin_inff();
    } else {
      write_row(row, scratch->out[i], scratch->rescale[i], out, scratch);
    }
  }
  for (int i = 0; args->lse && i < rows->count; i++)
    ((float *)
         args->lse)[(rows->batch * out->size[1] + head_of(rows, i)) * rows->places->lse_pitch + position_of(rows, i)] =
        scratch->lse[i];
}

/* CT: as all below, what rows see is public. */
static void read_queries(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch) {
  const dhp_attention *const args = rows->args;
  if (rows->count <= FEW)
    read_few(rows, factor_of(args), scratch);
  else
    read_lanes(scratch->q, &args->q, rows->batch, rows->head, rows->first, rows->count, factor_of(args), scratch);
}

/* The chains of all rows over the keys of a segment. */
static void chain(const dhp_cpu_rows *rows, const dhp_key_range seen[DHP_CPU_TILE_Q], int64_t segment,
                  dhp_cpu_scratch *scratch) {
  const dhp_attention *const args = rows->args;
  const int head_dim = (int)args->q.size[3];
  const int width = round_up((int)args->v.size[3], LANES), queries = round_up(rows->count, LANES);
  const int64_t key_head = rows->head / (args->q.size[1] / args->k.size[1]);

  for (int i = 0; i < queries; i += LANES) {
    store(scratch->maximum + i, dhp_ct_splat(-__builtin_inff()));
    store(scratch->sum + i, dhp_ct_splat(0.f));
  }
  clear_rows(scratch->out, rows->count, width);

  const tile_scores scores = {scratch->p, scratch->q, scratch->k};
  const tile_values values = {scratch->out, scratch->partial, scratch->p, scratch->v, scratch->rescale};
  /* no row sees a key of the segment before the first row's first, or from the last row's last on */
  const dhp_key_range part = dhp_segment_part((dhp_key_range){seen[0].first, seen[rows->count - 1].last}, segment);
  for (int64_t start = first_tile(part, segment), end = 0; start < part.last; start = end) {
    end = next_tile(start);
    const int n = (int)((end < part.last ? end : part.last) - start);
    const tile_keys keys = keys_of_tile(seen, queries, start, n);
    if (rows->count <= FEW) {
      attend_few(rows, &keys, key_head, start, n, scratch);
      continue;
    }
    read_keys(scratch->k, &args->k, rows, key_head, start, n, scratch);
    read_keys(scratch->v, &args->v, rows, key_head, start, n, scratch);
    for (int i = n; i < round_up(n, SCORE_KEYS); i++)
      memset(scratch->k[i], 0, sizeof scratch->k[i]);

    compute_scores(scores, queries, n, head_dim);
    if (args->softcap > 0.) cap_scores(scratch->p, n, queries, cap2_of(args));
    hide_scores(scratch, &keys, queries, round_up(n, 4));
    softmax(scratch, queries, round_up(n, 4));
    add_values(&values, &keys, rows->count, width);
  }
}

static void attend(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch) {
  const int queries = round_up(rows->count, LANES);
  dhp_key_range seen[DHP_CPU_TILE_Q];
  see(rows, seen, queries);
  read_queries(rows, scratch);

  const dhp_segments segments = dhp_cpu_segments(rows);
  /* without sinks the fold of one chain would have its bits */
  const int is_folded = rows->args->sinks || segments.last - segments.first > 1;
  if (is_folded) begin_fold(rows, queries, scratch);
  for (int64_t segment = segments.first; segment < segments.last; segment++) {
    chain(rows, seen, segment, scratch);
    if (is_folded) fold(rows, seen, segment, queries, scratch);
  }
  if (is_folded) end_fold(rows, queries, scratch);
  write_results(rows, seen, queries, scratch);
}

static void attend_segment(const dhp_cpu_rows *rows, int64_t segment, dhp_cpu_partial *partial,
                           dhp_cpu_scratch *scratch) {
  dhp_key_range seen[DHP_CPU_TILE_Q];
  see(rows, seen, LANES);
  read_queries(rows, scratch);
  chain(rows, seen, segment, scratch);
  keep_partial(rows, partial, scratch);
}

static void fold_segments(const dhp_cpu_rows *rows, const dhp_cpu_partial *partials, dhp_cpu_scratch *scratch) {
  dhp_key_range seen[DHP_CPU_TILE_Q];
  see(rows, seen, LANES);
  const dhp_segments segments = dhp_cpu_segments(rows);
  begin_fold(rows, LANES, scratch);
  for (int64_t segment = segments.first; segment < segments.last; segment++) {
    take_partial(rows, &partials[segment - segments.first], scratch);
    fold(rows, seen, segment, LANES, scratch);
  }
  end_fold(rows, LANES, scratch);
  write_results(rows, seen, LANES, scratch);
}

const dhp_cpu_kernel DHP_CPU_KERNEL = {DHP_INSTRUCTIONS, attend,         attend_segment, fold_segments,
                                       sum_rows,         query_gradient, key_gradients,  sink_gradient};
