/*
 * tile_segments.h - rows as folds over segments of their keys: segments.h has the definition.
 *
 * A segment's chain is in maximum, sum and out, the fold so far in folded_maximum, folded_sum and folded, and in
 * the end where the chain was.
 */
#ifndef DHP_CPU_TILE_SEGMENTS_H
#define DHP_CPU_TILE_SEGMENTS_H

#include "tile_rows.h"
#include "tile_scores.h"

/* What each row sees; lanes without a row, in the last vector, copy the last row. */
static void see(const dhp_cpu_rows *rows, dhp_key_range seen[DHP_CPU_TILE_Q], int queries) {
  for (int i = 0; i < queries; i++)
    seen[i] = dhp_mask_row(rows->mask, position_of(rows, i < rows->count ? i : rows->count - 1));
}

/*
 * Key tiles begin at multiples of their size, so that a row's sums are grouped alike whatever its neighbours see; and a
 * segment begins and ends one.
 */
static int64_t next_tile(int64_t start) { return (start / DHP_CPU_TILE_K + 1) * DHP_CPU_TILE_K; }

/* Where the tile of the first key of a segment's part begins. */
static int64_t first_tile(dhp_key_range part, int64_t segment) {
  const int64_t start = part.first / DHP_CPU_TILE_K * DHP_CPU_TILE_K;
  return start > segment * DHP_SEGMENT_KEYS ? start : segment * DHP_SEGMENT_KEYS;
}

/*
 * Of nothing, or of the heads' sinks, each with a value of 0. -0: added to a chain's -0 it leaves that as it is.
 * CT: straight-line per row.
 */
static void begin_fold(const dhp_cpu_rows *rows, int queries, dhp_cpu_scratch *scratch) {
  const int width = round_up((int)rows->args->v.size[3], LANES);
  const float *const sinks = rows->args->sinks;
  const lanes_f32 minus_infinity = dhp_ct_splat(-__builtin_inff());
  for (int query = 0; query < queries; query += LANES)
    store(&scratch->folded_maximum[query], minus_infinity);
  for (int i = 0; sinks && i < rows->count; i++)
    scratch->folded_maximum[i] = sinks[head_of(rows, i)] * 1.44269504f; /* log2(e) */
  for (int query = 0; query < queries; query += LANES) {
    const lanes_f32 sink = load(&scratch->folded_maximum[query]), maximum = dhp_ct_max(minus_infinity, sink);
    store(&scratch->folded_maximum[query], maximum);
    store(&scratch->folded_sum[query], dhp_ct_exp2(sink - shift_of(maximum)));
  }
  for (int i = 0; i < rows->count; i++)
    for (int d = 0; d < width; d += LANES)
      store(&scratch->folded[i][d], dhp_ct_splat(-0.f));
}

/*
 * Adds a segment. The maximum of a row that sees nothing of it is -inf, its sum 0: they change nothing.
 * CT: straight-line per vector and row; which rows see something of it is public.
 */
static void fold(const dhp_cpu_rows *rows, const dhp_key_range seen[DHP_CPU_TILE_Q], int64_t segment, int queries,
                 dhp_cpu_scratch *scratch) {
  const int width = round_up((int)rows->args->v.size[3], LANES);
  for (int query = 0; query < queries; query += LANES) {
    const lanes_f32 before = load(&scratch->folded_maximum[query]), maximum = load(&scratch->maximum[query]);
    const lanes_f32 after = dhp_ct_max(before, maximum), shift = shift_of(after);
    const lanes_f32 rescale = rescale_of(before, shift), weight = rescale_of(maximum, shift);
    const lanes_f32 sum = load(&scratch->sum[query]) * weight;
    store(&scratch->folded_maximum[query], after);
    store(&scratch->folded_sum[query], dhp_ct_fma(load(&scratch->folded_sum[query]), rescale, sum));
    store(&scratch->rescale[query], rescale);
    store(&scratch->weight[query], weight);
  }
  for (int i = 0; i < rows->count; i++) {
    const dhp_key_range part = dhp_segment_part(seen[i], segment);
    if (part.first == part.last) continue;
    const lanes_f32 rescale = dhp_ct_splat(scratch->rescale[i]), weight = dhp_ct_splat(scratch->weight[i]);
    for (int d = 0; d < width; d += LANES) {
      float *const folded = &scratch->folded[i][d];
      store(folded, dhp_ct_fma(load(folded), rescale, load(&scratch->out[i][d]) * weight));
    }
  }
}

static void end_fold(const dhp_cpu_rows *rows, int queries, dhp_cpu_scratch *scratch) {
  memcpy(scratch->maximum, scratch->folded_maximum, (size_t)queries * sizeof(float));
  memcpy(scratch->sum, scratch->folded_sum, (size_t)queries * sizeof(float));
  memcpy(scratch->out, scratch->folded, (size_t)rows->count * sizeof *scratch->out);
}

/* ---- chains of few rows, kept until all of them are there ------------------------------------------------------- */

/* CT: both move as much as the public shape says. */
static void keep_partial(const dhp_cpu_rows *rows, dhp_cpu_partial *partial, const dhp_cpu_scratch *scratch) {
  const int width = round_up((int)rows->args->v.size[3], LANES);
  store(partial->maximum, load(scratch->maximum));
  store(partial->sum, load(scratch->sum));
  for (int i = 0; i < rows->count; i++)
    memcpy(partial->out[i], scratch->out[i], (size_t)width * sizeof(float));
}

static void take_partial(const dhp_cpu_rows *rows, const dhp_cpu_partial *partial, dhp_cpu_scratch *scratch) {
  const int width = round_up((int)rows->args->v.size[3], LANES);
  store(scratch->maximum, load(partial->maximum));
  store(scratch->sum, load(partial->sum));
  for (int i = 0; i < rows->count; i++)
    memcpy(scratch->out[i], partial->out[i], (size_t)width * sizeof(float));
}

#endif
