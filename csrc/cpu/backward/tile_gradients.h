/*
 * tile_gradients.h - the tile kernel of the gradients: FlashAttention's backward (Dao et al., 2022), in two passes.
 *
 * Gradients of queries walk the key tiles with a tile of queries in the vector lanes, as the forward does; gradients of
 * keys walk the query tiles with a tile of keys in the lanes. Both recompute the scores and grad_out v; so no sum
 * crosses a unit of work, and every sum runs in an order that depends on the index of what is walked alone.
 *
 * What a pair that the mask hides has in p and ds is multiplied with nothing (0 * NaN is NaN): sums leave it out by
 * public bounds.
 */
#ifndef DHP_CPU_TILE_GRADIENTS_H
#define DHP_CPU_TILE_GRADIENTS_H

#include "../tile_rows.h"
#include "../tile_scores.h"
#include "../tile_softcap.h"
#include "../tile_values.h"

/* ---- lse and delta ---------------------------------------------------------------------------------------------- */

/* sum of a row times another, in one order. CT: straight-line but for the public head_dim. */
DHP_CT float inner_product(const char *row, const char *other, int head_dim, dhp_dtype dtype,
                           dhp_cpu_scratch *scratch) {
  const size_t size = element_size(dtype);
  lanes_f32 sum = dhp_ct_splat(0.f);
  int d = 0;
  for (; d + LANES <= head_dim; d += LANES)
    sum = dhp_ct_fma(widen(row + (size_t)d * size, dtype), widen(other + (size_t)d * size, dtype), sum);
  if (d < head_dim) {
    memset(scratch->edge, 0, sizeof scratch->edge);
    memcpy(scratch->edge, row + (size_t)d * size, (size_t)(head_dim - d) * size);
    const lanes_f32 last = widen(scratch->edge, dtype);
    memcpy(scratch->edge, other + (size_t)d * size, (size_t)(head_dim - d) * size);
    sum = dhp_ct_fma(last, widen(scratch->edge, dtype), sum);
  }
  store(scratch->edge, sum);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++)
      scratch->edge[i] += scratch->edge[i + half];
  return scratch->edge[0];
}

/* CT: straight-line but for the public dtype. */
static float delta_of(const dhp_cpu_gradient_rows *rows, int64_t i, dhp_cpu_scratch *scratch) {
  const dhp_tensor *const grad_out = &rows->args->grad_out, *const out = &rows->args->forward.out;
  const char *const g = row_pointer(grad_out, rows->batch, rows->head, i);
  const char *const o = row_pointer(out, rows->batch, rows->head, i);
  const int head_dim = (int)out->size[3];
  return out->dtype == DHP_FLOAT32   ? inner_product(g, o, head_dim, DHP_FLOAT32, scratch)
         : out->dtype == DHP_FLOAT16 ? inner_product(g, o, head_dim, DHP_FLOAT16, scratch)
                                     : inner_product(g, o, head_dim, DHP_BFLOAT16, scratch);
}

/* Where lse, grad_lse and delta have query row i of head h. */
static int64_t lse_row(const dhp_cpu_gradient_rows *rows, int64_t h, int64_t i) {
  return (rows->batch * rows->args->forward.q.size[1] + h) * rows->lse_pitch + i;
}

/* The lse of these rows as it is, and their delta: rowsum(grad_out * out) - grad_lse. CT: straight-line per row. */
static void sum_deltas(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch) {
  const int64_t first = lse_row(rows, rows->head, rows->first);
  const size_t size = (size_t)rows->count * sizeof(float);
  memcpy(scratch->lse, (const float *)rows->args->forward.lse + first, size);
  memset(scratch->rescale, 0, size);
  if (rows->args->grad_lse) memcpy(scratch->rescale, (const float *)rows->args->grad_lse + first, size);
  for (int i = 0; i < rows->count; i++)
    scratch->delta[i] = delta_of(rows, rows->first + i, scratch) - scratch->rescale[i];
}

/*
 * A row's lse that is not finite becomes NaN, and so do the row's probabilities: a score was +inf or NaN, or all were
 * -inf, where the softmax is NaN. CT: straight-line per row.
 */
static void sum_rows(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch) {
  const int64_t first = lse_row(rows, rows->head, rows->first);
  const size_t size = (size_t)rows->count * sizeof(float);
  const dhp_ct_u32 infinity = dhp_ct_splat_u32(0x7f800000u);
  sum_deltas(rows, scratch);
  for (int i = 0; i < round_up(rows->count, LANES); i += LANES) {
    const lanes_f32 lse = load(&scratch->lse[i]);
    const dhp_ct_u32 is_special = dhp_ct_equal_u32(dhp_ct_bits(lse) & infinity, infinity);
    store(&scratch->lse[i], dhp_ct_select(is_special, dhp_ct_splat(__builtin_nanf("")), lse));
  }
  memcpy(rows->lse + first, scratch->lse, size);
  memcpy(rows->delta + first, scratch->delta, size);
}

/* ---- one tile --------------------------------------------------------------------------------------------------- */

/* Do lse and delta belong to what is in the lanes, or to what is walked? */
enum { IN_LANES = 0, WALKED = 1 };

/*
 * Of the first n keys: p = 2^(score - lse log2(e)) in place of the scores, and where it is wanted ds = p (ds - delta),
 * if scores are capped times the slope of their cap. CT: straight-line per vector; n is public.
 */
DHP_CT void differentiate_tile(dhp_cpu_scratch *scratch, int queries, int n, const int place, const int wants_ds,
                               const int is_capped, float cap2) {
  const lanes_f32 minus_log2_e = dhp_ct_splat(-1.44269504f), one = dhp_ct_splat(1.f);
  const lanes_f32 to_tangent = dhp_ct_splat(is_capped ? 1.f / cap2 : 0.f); /* public */
  for (int key = 0; key < n; key++)
    for (int query = 0; query < queries; query += LANES) {
      float *const p = &scratch->p[key][query], *const ds = &scratch->ds[key][query];
      const lanes_f32 lse = place == WALKED ? dhp_ct_splat(scratch->lse[key]) : load(&scratch->lse[query]);
      const lanes_f32 score = load(p), x = dhp_ct_exp2(dhp_ct_fma(lse, minus_log2_e, score));
      store(p, x);
      if (!wants_ds) continue;
      const lanes_f32 delta = place == WALKED ? dhp_ct_splat(scratch->delta[key]) : load(&scratch->delta[query]);
      const lanes_f32 tangent = score * to_tangent, gradient = x * (load(ds) - delta);
      store(ds, is_capped ? gradient * dhp_ct_fma(-tangent, tangent, one) : gradient);
    }
}

/* The same of scores as products leave them, by whether the call caps them: public. */
DHP_CT void differentiate(const dhp_attention *args, dhp_cpu_scratch *scratch, int queries, int n, const int place,
                          const int wants_ds) {
  if (args->softcap > 0.) {
    cap_scores(scratch->p, n, queries, cap2_of(args));
    differentiate_tile(scratch, queries, n, place, wants_ds, 1, cap2_of(args));
  } else {
    differentiate_tile(scratch, queries, n, place, wants_ds, 0, 0.f);
  }
}

/* n rows of both tensors that are walked, and zeros up to the next whole block of scores. */
static void read_walked(const dhp_tensor *k, const dhp_tensor *v, int64_t b, int64_t h, int64_t start, int n,
                        dhp_cpu_scratch *scratch) {
  const int left = round_up(n, SCORE_KEYS) - n;
  read_rows(scratch->k, k, b, h, start, n, scratch);
  read_rows(scratch->v, v, b, h, start, n, scratch);
  clear_rows(scratch->k + n, left, round_up((int)k->size[3], LANES));
  clear_rows(scratch->v + n, left, round_up((int)v->size[3], LANES));
}

/* lse and delta of n query rows from row i of query head h on. */
static void read_sums(const dhp_cpu_gradient_rows *rows, int64_t h, int64_t i, int n, dhp_cpu_scratch *scratch) {
  const int64_t first = lse_row(rows, h, i);
  memcpy(scratch->lse, rows->lse + first, (size_t)n * sizeof(float));
  memcpy(scratch->delta, rows->delta + first, (size_t)n * sizeof(float));
}

/* What each row's range is, and for lanes without a row, in the last vector, the last row's. Sums begin at zero. */
static void begin_rows(const dhp_cpu_gradient_rows *rows, int lanes, dhp_key_range seen[DHP_CPU_TILE_Q],
                       dhp_cpu_scratch *scratch) {
  for (int i = 0; i < lanes; i++) {
    seen[i] = dhp_mask_row(rows->mask, rows->first + (i < rows->count ? i : rows->count - 1));
    scratch->rescale[i] = 1.f; /* of what the tiles before have summed: probabilities are final from the beginning */
  }
  clear_rows(scratch->out, rows->count, round_up((int)rows->args->forward.q.size[3], LANES));
}

static void write_gradient(const dhp_cpu_gradient_rows *rows, const dhp_tensor *t, float (*from)[DHP_CPU_PITCH_D],
                           float factor, dhp_cpu_scratch *scratch) {
  for (int i = 0; i < rows->count; i++)
    write_row(row_pointer(t, rows->batch, rows->head, rows->first + i), from[i], factor, t, scratch);
}

/* ---- gradients of queries --------------------------------------------------------------------------------------- */

static void query_gradient(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch) {
  const dhp_backward *const args = rows->args;
  const dhp_attention *const forward = &args->forward;
  const int head_dim = (int)forward->q.size[3], value_dim = (int)forward->v.size[3], count = rows->count;
  const int width = round_up(head_dim, LANES), queries = round_up(count, LANES);
  const int64_t key_head = rows->head / (forward->q.size[1] / forward->k.size[1]), b = rows->batch;
  read_lanes(scratch->q, &forward->q, b, rows->head, rows->first, count, factor_of(forward), scratch);
  read_lanes(scratch->g, &args->grad_out, b, rows->head, rows->first, count, 1.f, scratch);
  memset(scratch->lse, 0, sizeof scratch->lse);
  memset(scratch->delta, 0, sizeof scratch->delta);
  read_sums(rows, rows->head, rows->first, count, scratch);
  dhp_key_range seen[DHP_CPU_TILE_Q] = {{0, 0}};
  begin_rows(rows, queries, seen, scratch);
  const int64_t last = seen[count - 1].last;

  const tile_scores scores = {scratch->p, scratch->q, scratch->k}, products = {scratch->ds, scratch->g, scratch->v};
  const tile_values dq = {scratch->out, scratch->partial, scratch->ds, scratch->k, scratch->rescale};
  for (int64_t start = seen[0].first / DHP_CPU_TILE_K * DHP_CPU_TILE_K; start < last; start += DHP_CPU_TILE_K) {
    const int n = last - start < DHP_CPU_TILE_K ? (int)(last - start) : DHP_CPU_TILE_K;
    const tile_keys keys = keys_of_tile(seen, queries, start, n);
    read_walked(&forward->k, &forward->v, b, key_head, start, n, scratch);
    compute_scores(scores, queries, n, head_dim);
    compute_scores(products, queries, n, value_dim);
    differentiate(forward, scratch, queries, n, IN_LANES, 1);
    add_values(&dq, &keys, count, width);
  }
  write_gradient(rows, &args->dq, scratch->out, (float)forward->scale, scratch);
}

/* ---- gradients of keys ------------------------------------------------------------------------------------------ */

static void key_gradients(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch) {
  const dhp_backward *const args = rows->args;
  const dhp_attention *const forward = &args->forward;
  const int head_dim = (int)forward->q.size[3], value_dim = (int)forward->v.size[3], count = rows->count;
  const int width = round_up(head_dim, LANES), value_width = round_up(value_dim, LANES);
  const int lanes = round_up(count, LANES);
  const int64_t group = forward->q.size[1] / forward->k.size[1], b = rows->batch;
  read_lanes(scratch->q, &forward->k, b, rows->head, rows->first, count, factor_of(forward), scratch);
  read_lanes(scratch->g, &forward->v, b, rows->head, rows->first, count, 1.f, scratch);
  dhp_key_range seen[DHP_CPU_TILE_Q] = {{0, 0}}; /* ranges of queries */
  begin_rows(rows, lanes, seen, scratch);
  clear_rows(scratch->dv, count, value_width);
  const int64_t last = seen[count - 1].last;

  const tile_scores scores = {scratch->p, scratch->q, scratch->k}, products = {scratch->ds, scratch->g, scratch->v};
  const tile_values dk = {scratch->out, scratch->partial, scratch->ds, scratch->k, scratch->rescale};
  const tile_values dv = {scratch->dv, scratch->partial, scratch->p, scratch->v, scratch->rescale};
  for (int64_t head = rows->head * group; head < (rows->head + 1) * group; head++)
    for (int64_t start = seen[0].first / DHP_CPU_TILE_K * DHP_CPU_TILE_K; start < last; start += DHP_CPU_TILE_K) {
      const int n = last - start < DHP_CPU_TILE_K ? (int)(last - start) : DHP_CPU_TILE_K;
      const tile_keys queries = keys_of_tile(seen, lanes, start, n);
      read_walked(&forward->q, &args->grad_out, b, head, start, n, scratch);
      read_sums(rows, head, start, n, scratch);
      compute_scores(scores, lanes, n, head_dim);
      if (args->dk.data) {
        compute_scores(products, lanes, n, value_dim);
        differentiate(forward, scratch, lanes, n, WALKED, 1);
        add_values(&dk, &queries, count, width);
      } else {
        differentiate(forward, scratch, lanes, n, WALKED, 0);
      }
      if (args->dv.data) add_values(&dv, &queries, count, value_width);
    }
  if (args->dk.data) write_gradient(rows, &args->dk, scratch->out, (float)forward->scale, scratch);
  if (args->dv.data) write_gradient(rows, &args->dv, scratch->dv, 1.f, scratch);
}

#endif
