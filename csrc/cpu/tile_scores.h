/* tile_scores.h - the scores of a key tile, and what softmax makes of them. */
#ifndef DHP_CPU_TILE_SCORES_H
#define DHP_CPU_TILE_SCORES_H

#include "tile_keys.h"

/* Scores p[key][query] = <q[..][query], k[key]>: queries in the lanes. A backward has other rows in these places. */
typedef struct tile_scores {
  float (*p)[DHP_CPU_PITCH_Q]; /* [key][query] */
  float (*q)[DHP_CPU_PITCH_Q]; /* [d][query] */
  float (*k)[DHP_CPU_PITCH_D]; /* [key][d] */
} tile_scores;

/*
 * Adds the part [from, to) of the inner products of SCORE_KEYS keys and `vectors` vectors of queries, summed in
 * registers, to the scores, or writes it in their place if it is fresh: the first part. CT: bounds are public.
 */
/* clang-format off */
DHP_CT void score_block(tile_scores tile, int query, int key, int from, int to, int is_fresh, const int vectors) {
  lanes_f32 s[SCORE_KEYS][SCORE_VECTORS];
  UNROLL for (int j = 0; j < SCORE_KEYS; j++)
    UNROLL for (int i = 0; i < vectors; i++) s[j][i] = dhp_ct_splat(0.f);
  for (int d = from; d < to; d++) {
    lanes_f32 q[SCORE_VECTORS];
    UNROLL for (int i = 0; i < vectors; i++) q[i] = load(&tile.q[d][query + i * LANES]);
    UNROLL for (int j = 0; j < SCORE_KEYS; j++) {
      const lanes_f32 k = dhp_ct_splat(tile.k[key + j][d]);
      UNROLL for (int i = 0; i < vectors; i++) s[j][i] = dhp_ct_fma(k, q[i], s[j][i]);
    }
  }
  UNROLL for (int j = 0; j < SCORE_KEYS; j++)
    UNROLL for (int i = 0; i < vectors; i++) {
      float *const p = &tile.p[key + j][query + i * LANES];
      store(p, is_fresh ? s[j][i] : load(p) + s[j][i]);
    }
}
/* clang-format on */

/* Scores of all queries and the tile's first n keys, and of the (zero) keys up to the next whole block: unused. */
static void compute_scores(tile_scores tile, int queries, int n, int head_dim) {
  const int block = SCORE_VECTORS * LANES;
  for (int from = 0; from < head_dim; from += DHP_CPU_TILE_D) {
    const int to = head_dim - from < DHP_CPU_TILE_D ? head_dim : from + DHP_CPU_TILE_D;
    int query = 0;
    for (; query + block <= queries; query += block)
      for (int key = 0; key < n; key += SCORE_KEYS)
        score_block(tile, query, key, from, to, from == 0, SCORE_VECTORS);
    for (; query < queries; query += LANES)
      for (int key = 0; key < n; key += SCORE_KEYS)
        score_block(tile, query, key, from, to, from == 0, 1);
  }
}

DHP_CT void hide_unless(dhp_ct_u32 is_visible, float *p) {
  store(p, dhp_ct_select(is_visible, load(p), dhp_ct_splat(-__builtin_inff())));
}

/*
 * -inf in place of the scores, among the first n keys, that a row does not see: those before its range, which no row
 * has behind the last row's first key, and those behind it, which no row has before the first row's last. CT: what a
 * row sees is public.
 */
static void hide_scores(dhp_cpu_scratch *scratch, const tile_keys *seen, int queries, int n) {
  const int before = seen->first[queries - 1], behind = seen->last[0];
  for (int query = 0; query < queries; query += LANES) {
    dhp_ct_i32 first, last;
    memcpy(&first, seen->first + query, sizeof first);
    memcpy(&last, seen->last + query, sizeof last);
    for (int key = 0; key < before; key++)
      hide_unless(~dhp_ct_less_i32((dhp_ct_i32)dhp_ct_splat_u32((uint32_t)key), first), &scratch->p[key][query]);
    for (int key = behind; key < n; key++)
      hide_unless(dhp_ct_less_i32((dhp_ct_i32)dhp_ct_splat_u32((uint32_t)key), last), &scratch->p[key][query]);
  }
}

/* ---- softmax --------------------------------------------------------------------------------------------------- */

/*
 * What is subtracted from the scores of a row: its maximum, or 0 while that is infinite. -inf (every score so far)
 * minus -inf would be NaN; after +inf the sum becomes +inf and the row inf / inf, as it does without any subtraction.
 * CT: straight-line.
 */
static lanes_f32 shift_of(lanes_f32 maximum) {
  const dhp_ct_u32 magnitude = dhp_ct_bits(maximum) & dhp_ct_splat_u32(0x7fffffffu);
  return dhp_ct_select(dhp_ct_equal_u32(magnitude, dhp_ct_splat_u32(0x7f800000u)), dhp_ct_splat(0.f), maximum);
}

/*
 * What sums below a maximum are multiplied with when another shift takes the place of its own. Where that maximum is
 * -inf they are 0, and 0 times inf would not be. CT: straight-line.
 */
DHP_CT lanes_f32 rescale_of(lanes_f32 maximum, lanes_f32 shift) {
  const dhp_ct_u32 is_lowest = dhp_ct_equal_u32(dhp_ct_bits(maximum), dhp_ct_bits(dhp_ct_splat(-__builtin_inff())));
  return dhp_ct_select(is_lowest, dhp_ct_splat(0.f), dhp_ct_exp2(shift_of(maximum) - shift));
}

/*
 * Brings the running maximum of LANES rows from `query` on up to date with the highest score of a tile; what then is
 * subtracted from their scores. CT: straight-line.
 */
DHP_CT lanes_f32 raise_maximum(dhp_cpu_scratch *scratch, int query, lanes_f32 highest) {
  const lanes_f32 before = load(&scratch->maximum[query]);
  const lanes_f32 after = dhp_ct_max(before, highest);
  const lanes_f32 shift = shift_of(after);
  store(&scratch->maximum[query], after);
  store(&scratch->rescale[query], rescale_of(before, shift));
  return shift;
}

/* CT: straight-line. */
DHP_CT void add_to_sum(dhp_cpu_scratch *scratch, int query, lanes_f32 tile_sum) {
  store(&scratch->sum[query], dhp_ct_fma(load(&scratch->sum[query]), load(&scratch->rescale[query]), tile_sum));
}

/*
 * Turns the scores of n keys (a multiple of 4) into p = 2^(score - shift), and brings maximum and sum up to date.
 * Four partial maxima and sums, each of every fourth key: shorter dependency chains, and less rounding.
 * A tile of which a row sees nothing leaves the row's state as it is: p is 0 and rescale 1 (or the sum 0).
 * CT: straight-line per vector; n is public.
 */
static void softmax(dhp_cpu_scratch *scratch, int queries, int n) {
  const lanes_f32 minus_infinity = dhp_ct_splat(-__builtin_inff());
  for (int query = 0; query < queries; query += LANES) {
    lanes_f32 top[4] = {minus_infinity, minus_infinity, minus_infinity, minus_infinity};
    for (int key = 0; key < n; key += 4)
      UNROLL for (int u = 0; u < 4; u++) top[u] = dhp_ct_max(top[u], load(&scratch->p[key + u][query]));
    const lanes_f32 highest = dhp_ct_max(dhp_ct_max(top[0], top[1]), dhp_ct_max(top[2], top[3]));
    const lanes_f32 shift = raise_maximum(scratch, query, highest);

    lanes_f32 sum[4] = {dhp_ct_splat(0.f), dhp_ct_splat(0.f), dhp_ct_splat(0.f), dhp_ct_splat(0.f)};
    for (int key = 0; key < n; key += 4)
      UNROLL for (int u = 0; u < 4; u++) {
        float *const p = &scratch->p[key + u][query];
        const lanes_f32 x = dhp_ct_exp2(load(p) - shift);
        sum[u] += x;
        store(p, x);
      }
    add_to_sum(scratch, query, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

#endif
