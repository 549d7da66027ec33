/*
 * tile_few.h - a tile of so few query rows that in the vector lanes they would leave most of them idle: a decoding
 * step.
 *
 * Keys are in the lanes of scores instead. Keys and values are used as they are read, once for all rows: nothing of
 * them is kept. Each number is computed as it is with queries in the lanes, and each sum is taken in the same order: a
 * row has the same bits either way.
 *
 * In scratch memory, k holds the queries times the factor of scores, and ds the scores as [row][key]; both have
 * DHP_CPU_FEW_ROWS rows.
 */
#ifndef DHP_CPU_TILE_FEW_H
#define DHP_CPU_TILE_FEW_H

#include "tile_rows.h"
#include "tile_scores.h"
#include "tile_softcap.h"

enum { FEW = DHP_CPU_FEW_ROWS };

/* Where the queries' rows are expected; zeros for rows that are not there, and behind a row up to a whole vector. */
static void read_few(const dhp_cpu_rows *rows, float factor, dhp_cpu_scratch *scratch) {
  const dhp_tensor *const q = &rows->args->q;
  const int width = round_up((int)q->size[3], LANES);
  const lanes_f32 factors = dhp_ct_splat(factor);
  clear_rows(scratch->k, FEW, width);
  for (int i = 0; i < rows->count; i++) {
    read_rows(scratch->k + i, q, rows->batch, head_of(rows, i), position_of(rows, i), 1, scratch);
    for (int d = 0; d < width; d += LANES)
      store(scratch->k[i] + d, load(scratch->k[i] + d) * factors);
  }
}

/* ---- scores ----------------------------------------------------------------------------------------------------- */

/* s[row] += q[row][d] x, a vector of keys. */
/* clang-format off */
DHP_CT void add_products(lanes_f32 s[FEW], lanes_f32 x, int d, const int count, const dhp_cpu_scratch *scratch) {
  UNROLL for (int r = 0; r < count; r++) s[r] = dhp_ct_fma(x, dhp_ct_splat(scratch->k[r][d]), s[r]);
}

/* What as many bytes as a vector has, all inside the rows, add to the scores: elements of 16 bits travel in pairs. */
DHP_CT void add_bytes(lanes_f32 s[FEW], const char *const keys[LANES], int d, const dhp_dtype dtype, const int count,
                      const dhp_cpu_scratch *scratch) {
  lanes_f32 x[LANES];
  UNROLL for (int j = 0; j < LANES; j++) x[j] = load(keys[j] + (size_t)d * element_size(dtype));
  transpose(x);
  UNROLL for (int j = 0; j < LANES; j++)
    if (dtype == DHP_FLOAT32) {
      add_products(s, x[j], d + j, count, scratch);
    } else {
      const dhp_ct_u32 pair = dhp_ct_bits(x[j]);
      add_products(s, widen_half(pair & 0xffffu, dtype), d + 2 * j, count, scratch);
      add_products(s, widen_half(pair >> 16, dtype), d + 2 * j + 1, count, scratch);
    }
}

/* The same of a vector of elements, the last of which may be missing. */
DHP_CT void add_elements(lanes_f32 s[FEW], const char *const keys[LANES], int d, int head_dim, const dhp_dtype dtype,
                         const int count, dhp_cpu_scratch *scratch) {
  lanes_f32 x[LANES];
  UNROLL for (int j = 0; j < LANES; j++) x[j] = read_vector(keys[j], d, head_dim, dtype, scratch);
  transpose(x);
  UNROLL for (int j = 0; j < LANES; j++) add_products(s, x[j], d + j, count, scratch);
}

/* Scores of LANES keys to ds[row][key...], for as many rows as are computed anyway. */
DHP_CT void score_keys(dhp_cpu_scratch *scratch, const char *const keys[LANES], int key, int head_dim,
                       const dhp_dtype dtype, const int count) {
  const int whole = LANES * (int)(sizeof(float) / element_size(dtype));
  for (int from = 0; from < head_dim; from += DHP_CPU_TILE_D) {
    const int to = head_dim - from < DHP_CPU_TILE_D ? head_dim : from + DHP_CPU_TILE_D;
    lanes_f32 s[FEW];
    UNROLL for (int r = 0; r < count; r++) s[r] = dhp_ct_splat(0.f);
    int d = from;
    for (; d + whole <= to; d += whole)
      add_bytes(s, keys, d, dtype, count, scratch);
    for (; d < to; d += LANES)
      add_elements(s, keys, d, head_dim, dtype, count, scratch);
    UNROLL for (int r = 0; r < count; r++) {
      float *const score = scratch->ds[r] + key;
      store(score, from == 0 ? s[r] : load(score) + s[r]);
    }
  }
}
/* clang-format on */

/* The scores of n keys from `start` on; for lanes behind them those of the last one. CT: bounds are public. */
DHP_CT void few_scores(const dhp_cpu_rows *rows, int64_t key_head, int64_t start, int n, const dhp_dtype dtype,
                       dhp_cpu_scratch *scratch) {
  const dhp_tensor *const k = &rows->args->k;
  const int head_dim = (int)k->size[3], row_size = head_dim * (int)element_size(dtype);
  const int64_t pitch = k->stride[2] * (int64_t)element_size(dtype);
  for (int key = 0; key < n; key += LANES) {
    const char *const first = key_row(k, rows, key_head, start + key), *keys[LANES];
    const char *const ahead = row_ahead(first, k, rows, key_head, start + key, start + n - 1);
    for (int j = 0; j < LANES; j++) {
      keys[j] = first + (key + j < n ? j : n - 1 - key) * pitch;
      prefetch(ahead + j * pitch, row_size);
    }
    if (rows->count == 1)
      score_keys(scratch, keys, key, head_dim, dtype, 1);
    else
      score_keys(scratch, keys, key, head_dim, dtype, FEW);
  }
}

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

/* -inf in place of a row's scores of keys outside [first, last), and the largest of every LANES-th of all. */
DHP_CT lanes_f32 hide_and_maximize(float *scores, int32_t first, int32_t last, int n) {
  const lanes_f32 minus_infinity = dhp_ct_splat(-__builtin_inff());
  const dhp_ct_i32 from = (dhp_ct_i32)dhp_ct_splat_u32((uint32_t)first);
  const dhp_ct_i32 to = (dhp_ct_i32)dhp_ct_splat_u32((uint32_t)last), step = (dhp_ct_i32)dhp_ct_splat_u32(LANES);
  dhp_ct_i32 key;
  UNROLL for (int i = 0; i < LANES; i++) key[i] = i;
  lanes_f32 top = minus_infinity;
  for (int i = 0; i < n; i += LANES) {
    const dhp_ct_u32 is_visible = dhp_ct_less_i32(key, to) & ~dhp_ct_less_i32(key, from);
    const lanes_f32 score = dhp_ct_select(is_visible, load(scores + i), minus_infinity);
    store(scores + i, score);
    top = dhp_ct_max(top, score);
    key += step;
  }
  return top;
}

/* Scores of n keys to p = 2^(score - shift), and their sum, as softmax() adds it up. CT: straight-line; n is public. */
DHP_CT float few_probabilities(float *scores, float shift, int n) {
  typedef float every_fourth __attribute__((vector_size(16)));
  const lanes_f32 shifts = dhp_ct_splat(shift);
  for (int i = 0; i < n; i += LANES)
    store(scores + i, dhp_ct_exp2(load(scores + i) - shifts));
  every_fourth sum = {0.f, 0.f, 0.f, 0.f};
  for (int i = 0; i < n; i += 4) {
    every_fourth x;
    memcpy(&x, scores + i, sizeof x);
    sum += x;
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/*
 * softmax() of the scores of n keys (a multiple of a vector), and what hide_scores() does before. CT: straight-line per
 * row; n, and what a row sees, are public.
 */
static void softmax_of_few(dhp_cpu_scratch *scratch, const tile_keys *seen, int rows, int n) {
  lanes_f32 top[LANES];
  UNROLL for (int i = 0; i < LANES; i++) {
    top[i] = dhp_ct_splat(-__builtin_inff());
    if (i < rows) top[i] = hide_and_maximize(scratch->ds[i], seen->first[i], seen->last[i], n);
  }
  transpose(top);
  UNROLL for (int i = 1; i < LANES; i++) top[0] = dhp_ct_max(top[0], top[i]);

  store(scratch->edge, raise_maximum(scratch, 0, top[0]));
  for (int i = 0; i < rows; i++)
    scratch->edge[i] = few_probabilities(scratch->ds[i], scratch->edge[i], n);
  add_to_sum(scratch, 0, load(scratch->edge));
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

/*
 * out = out * rescale + p v of keys [from, to) of the tile, for `count` rows from `row` on and so many vectors from d
 * on. is_whole: rows do not end before. CT: bounds are public.
 */
/* clang-format off */
DHP_CT void few_value_block(const dhp_cpu_rows *rows, int64_t key_head, int64_t start, int row, int d, int from, int to,
                            const dhp_dtype dtype, const int count, const int vectors, const int is_whole,
                            dhp_cpu_scratch *scratch) {
  const dhp_tensor *const v = &rows->args->v;
  const int64_t step = v->stride[2] * (int64_t)element_size(dtype), element = (int64_t)element_size(dtype);
  lanes_f32 sum[FEW][VALUE_VECTORS];
  UNROLL for (int r = 0; r < count; r++)
    UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = dhp_ct_splat(0.f);
  for (int key = from, run = 0; key < to; key = run) {
    const char *values = key_row(v, rows, key_head, start + key);
    const char *ahead = row_ahead(values, v, rows, key_head, start + key, start + to - 1);
    run = (key / DHP_CPU_RUN + 1) * DHP_CPU_RUN < to ? (key / DHP_CPU_RUN + 1) * DHP_CPU_RUN : to;
    for (int j = key; j < run; j++, values += step, ahead += step) {
      prefetch(ahead + d * element, vectors * LANES * (int)element);
      lanes_f32 value[VALUE_VECTORS];
      UNROLL for (int i = 0; i < vectors; i++)
        value[i] = is_whole ? widen(values + (d + i * LANES) * element, dtype)
                            : read_vector(values, d + i * LANES, (int)v->size[3], dtype, scratch);
      UNROLL for (int r = 0; r < count; r++) {
        const lanes_f32 factor = dhp_ct_splat(scratch->ds[row + r][j]);
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = dhp_ct_fma(factor, value[i], sum[r][i]);
      }
    }
  }
  UNROLL for (int r = 0; r < count; r++) {
    const lanes_f32 rescale = dhp_ct_splat(scratch->rescale[row + r]);
    UNROLL for (int i = 0; i < vectors; i++) {
      float *const out = &scratch->out[row + r][d + i * LANES];
      store(out, dhp_ct_fma(load(out), rescale, sum[r][i]));
    }
  }
}
/* clang-format on */

DHP_CT void few_value_rows(const dhp_cpu_rows *rows, int64_t key_head, int64_t start, int row, int from, int to,
                           const dhp_dtype dtype, const int count, dhp_cpu_scratch *scratch) {
  const int head_dim = (int)rows->args->v.size[3];
  int d = 0;
  for (; d + VALUE_VECTORS * LANES <= head_dim; d += VALUE_VECTORS * LANES)
    few_value_block(rows, key_head, start, row, d, from, to, dtype, count, VALUE_VECTORS, 1, scratch);
  for (; d < head_dim; d += LANES)
    few_value_block(rows, key_head, start, row, d, from, to, dtype, count, 1, 0, scratch);
}

/* A row that sees nothing of the tile keeps the bits it has. */
DHP_CT void add_few_values(const dhp_cpu_rows *rows, const tile_keys *seen, int64_t key_head, int64_t start,
                           const dhp_dtype dtype, dhp_cpu_scratch *scratch) {
  const int32_t *const first = seen->first, *const last = seen->last;
  const int end = rows->count - 1;
  if (rows->count == FEW && first[0] == first[end] && last[0] == last[end]) {
    few_value_rows(rows, key_head, start, 0, first[0], last[0], dtype, FEW, scratch);
    return;
  }
  for (int row = 0; row <= end; row++)
    if (first[row] < last[row]) few_value_rows(rows, key_head, start, row, first[row], last[row], dtype, 1, scratch);
}

/* ---- a tile ----------------------------------------------------------------------------------------------------- */

DHP_CT void attend_few_of(const dhp_cpu_rows *rows, const tile_keys *seen, int64_t key_head, int64_t start, int n,
                          const dhp_dtype dtype, dhp_cpu_scratch *scratch) {
  const dhp_attention *const args = rows->args;
  few_scores(rows, key_head, start, n, dtype, scratch);
  if (args->softcap > 0.) cap_scores(scratch->ds, rows->count, round_up(n, LANES), cap2_of(args));
  softmax_of_few(scratch, seen, rows->count, round_up(n, LANES));
  add_few_values(rows, seen, key_head, start, dtype, scratch);
}

/* The step from a key tile to the next: n keys from `start` on. The choice of dtype gives each its own loops. */
static void attend_few(const dhp_cpu_rows *rows, const tile_keys *seen, int64_t key_head, int64_t start, int n,
                       dhp_cpu_scratch *scratch) {
  const dhp_dtype dtype = rows->args->q.dtype;
  if (dtype == DHP_FLOAT32)
    attend_few_of(rows, seen, key_head, start, n, DHP_FLOAT32, scratch);
  else if (dtype == DHP_FLOAT16)
    attend_few_of(rows, seen, key_head, start, n, DHP_FLOAT16, scratch);
  else
    attend_few_of(rows, seen, key_head, start, n, DHP_BFLOAT16, scratch);
}

#endif
