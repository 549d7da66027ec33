/*
 * tile_impl.h - the tile kernel: FlashAttention's online softmax (Dao et al., 2022) with queries in the vector lanes.
 *
 * Included once per instruction set by a tile_*.c that defines
 *   DHP_CT_LANES, DHP_CT_FMA             floats in a vector register, and their multiply-add if there is one (ct.h),
 *   DHP_SCORE_KEYS, DHP_SCORE_VECTORS    the register block of scores: keys (a divisor of DHP_CPU_TILE_K) and vectors,
 *   DHP_VALUE_ROWS, DHP_VALUE_VECTORS    the register block of p v: query rows and vectors,
 *   DHP_ATTEND                           the name of the function.
 *
 * Scores are computed as S^T = K Q^T, a vector of queries times one element of k: what belongs to one query stays in
 * one lane from its scores to its sum, in an order that depends on the key index alone. So there is no reduction across
 * lanes, and a row's bits do not depend on its neighbours. For O += P V the lanes hold d.
 *
 * A score or value that a row may not see is kept out by public bounds: its p is never multiplied with its v (0 * NaN
 * is NaN).
 */
#include <string.h>

#include "../ct.h"
#include "convert.h"
#include "tile.h"

enum {
  LANES = DHP_CT_LANES,
  SCORE_KEYS = DHP_SCORE_KEYS,
  SCORE_VECTORS = DHP_SCORE_VECTORS,
  VALUE_ROWS = DHP_VALUE_ROWS,
  VALUE_VECTORS = DHP_VALUE_VECTORS
};

typedef dhp_ct_f32 lanes_f32;
typedef uint16_t lanes_u16 __attribute__((vector_size(DHP_CT_LANES * 2)));

/* Written before the loops of a register block; clang-format would join nested ones, so it is off around them. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

DHP_CT lanes_f32 load(const float *from) {
  lanes_f32 x;
  memcpy(&x, from, sizeof x);
  return x;
}

DHP_CT void store(float *to, lanes_f32 x) { memcpy(to, &x, sizeof x); }

static int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

/* ---- rows in and out ------------------------------------------------------------------------------------------- */

static size_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT32 ? sizeof(float) : sizeof(uint16_t); }

static char *row_pointer(const dhp_tensor *t, int64_t b, int64_t h, int64_t s) {
  const int64_t offset = b * t->stride[0] + h * t->stride[1] + s * t->stride[2];
  return (char *)t->data + offset * (int64_t)element_size(t->dtype);
}

/* CT: the conversions are straight-line. */
DHP_CT lanes_f32 widen(const void *from, dhp_dtype dtype) {
  if (dtype == DHP_FLOAT32) return load(from);
  lanes_u16 narrow;
  memcpy(&narrow, from, sizeof narrow);
  const dhp_ct_u32 bits = __builtin_convertvector(narrow, dhp_ct_u32);
  return dtype == DHP_FLOAT16 ? dhp_float16_to_float32(bits) : dhp_bfloat16_to_float32(bits);
}

/* CT: as widen. */
DHP_CT void narrow(void *to, lanes_f32 x, dhp_dtype dtype) {
  x = dhp_ct_canonical(x);
  if (dtype == DHP_FLOAT32) {
    store(to, x);
  } else {
    const dhp_ct_u32 bits = dtype == DHP_FLOAT16 ? dhp_float32_to_float16(x) : dhp_float32_to_bfloat16(x);
    const lanes_u16 halves = __builtin_convertvector(bits, lanes_u16);
    memcpy(to, &halves, sizeof halves);
  }
}

/* A row of D elements to float32, with zeros up to the next multiple of a vector. */
DHP_CT void read_row(float *to, const char *row, int head_dim, dhp_dtype dtype, dhp_cpu_scratch *scratch) {
  const size_t size = element_size(dtype);
  int d = 0;
  for (; d + LANES <= head_dim; d += LANES)
    store(to + d, widen(row + (size_t)d * size, dtype));
  if (d < head_dim) {
    memset(scratch->edge, 0, sizeof scratch->edge);
    memcpy(scratch->edge, row + (size_t)d * size, (size_t)(head_dim - d) * size);
    store(to + d, widen(scratch->edge, dtype));
  }
}

DHP_CT void write_row(char *row, const float *from, lanes_f32 factor, int head_dim, dhp_dtype dtype,
                      dhp_cpu_scratch *scratch) {
  const size_t size = element_size(dtype);
  int d = 0;
  for (; d + LANES <= head_dim; d += LANES)
    narrow(row + (size_t)d * size, load(from + d) * factor, dtype);
  if (d < head_dim) {
    narrow(scratch->edge, load(from + d) * factor, dtype);
    memcpy(row + (size_t)d * size, scratch->edge, (size_t)(head_dim - d) * size);
  }
}

/* n rows from row s on, as [n][DHP_CPU_PITCH_D]. The switch gives each dtype its own loop. */
static void read_rows(float (*to)[DHP_CPU_PITCH_D], const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int n,
                      dhp_cpu_scratch *scratch) {
  const int head_dim = (int)t->size[3];
  for (int i = 0; i < n; i++) {
    const char *const row = row_pointer(t, b, h, s + i);
    switch (t->dtype) {
    case DHP_FLOAT32: read_row(to[i], row, head_dim, DHP_FLOAT32, scratch); break;
    case DHP_FLOAT16: read_row(to[i], row, head_dim, DHP_FLOAT16, scratch); break;
    case DHP_BFLOAT16: read_row(to[i], row, head_dim, DHP_BFLOAT16, scratch); break;
    }
  }
}

/* q of these rows times scale * log2(e) (e^x = 2^(x log2(e))), transposed; lanes without a row hold zeros. */
static void read_queries(const dhp_cpu_rows *rows, int queries, dhp_cpu_scratch *scratch) {
  const dhp_tensor *const q = &rows->args->q;
  const int head_dim = (int)q->size[3];
  const float scale2 = (float)((double)rows->args->scale * 1.4426950408889634);
  read_rows(scratch->partial, q, rows->batch, rows->head, rows->first, rows->count, scratch);
  for (int d = 0; d < head_dim; d++) {
    store(scratch->q[d] + queries - LANES, dhp_ct_splat(0.f)); /* lanes without a row are in the last vector */
    for (int i = 0; i < rows->count; i++)
      scratch->q[d][i] = scratch->partial[i][d] * scale2;
  }
}

/* ---- what is visible: public ----------------------------------------------------------------------------------- */

/* How many keys row i sees: they are the first ones. Written so that no causal_offset overflows. */
static int64_t visible_keys(const dhp_attention *args, int64_t i) {
  const int64_t keys = args->k.size[2];
  if (!args->is_causal || args->causal_offset >= keys) return keys;
  const int64_t visible = args->causal_offset + i + 1;
  return visible < 0 ? 0 : visible < keys ? visible : keys;
}

/* ---- scores ---------------------------------------------------------------------------------------------------- */

/*
 * Adds the part [from, to) of the inner products of SCORE_KEYS keys and `vectors` vectors of queries, summed in
 * registers, to the scores; from 0 begins at zero. CT: bounds are public.
 */
/* clang-format off */
DHP_CT void score_block(dhp_cpu_scratch *scratch, int query, int key, int from, int to, const int vectors) {
  lanes_f32 s[SCORE_KEYS][SCORE_VECTORS];
  UNROLL for (int j = 0; j < SCORE_KEYS; j++)
    UNROLL for (int i = 0; i < vectors; i++) s[j][i] = dhp_ct_splat(0.f);
  for (int d = from; d < to; d++) {
    lanes_f32 q[SCORE_VECTORS];
    UNROLL for (int i = 0; i < vectors; i++) q[i] = load(&scratch->q[d][query + i * LANES]);
    UNROLL for (int j = 0; j < SCORE_KEYS; j++) {
      const lanes_f32 k = dhp_ct_splat(scratch->k[key + j][d]);
      UNROLL for (int i = 0; i < vectors; i++) s[j][i] = dhp_ct_fma(k, q[i], s[j][i]);
    }
  }
  UNROLL for (int j = 0; j < SCORE_KEYS; j++)
    UNROLL for (int i = 0; i < vectors; i++) {
      float *const p = &scratch->p[key + j][query + i * LANES];
      store(p, from == 0 ? s[j][i] : load(p) + s[j][i]);
    }
}
/* clang-format on */

/* Scores of all queries and the tile's first n keys, and of the (zero) keys up to the next whole block: unused. */
static void compute_scores(dhp_cpu_scratch *scratch, int queries, int n, int head_dim) {
  const int block = SCORE_VECTORS * LANES;
  for (int from = 0; from < head_dim; from += DHP_CPU_TILE_D) {
    const int to = head_dim - from < DHP_CPU_TILE_D ? head_dim : from + DHP_CPU_TILE_D;
    int query = 0;
    for (; query + block <= queries; query += block)
      for (int key = 0; key < n; key += SCORE_KEYS)
        score_block(scratch, query, key, from, to, SCORE_VECTORS);
    for (; query < queries; query += LANES)
      for (int key = 0; key < n; key += SCORE_KEYS)
        score_block(scratch, query, key, from, to, 1);
  }
}

/* -inf in place of the scores of keys from a row's bound on. CT: the bounds are public. */
static void hide_scores(dhp_cpu_scratch *scratch, const int32_t bound[DHP_CPU_TILE_Q], int queries, int first, int n) {
  const lanes_f32 minus_infinity = dhp_ct_splat(-__builtin_inff());
  for (int query = 0; query < queries; query += LANES) {
    dhp_ct_i32 limit;
    memcpy(&limit, bound + query, sizeof limit);
    for (int key = first; key < n; key++) {
      float *const p = &scratch->p[key][query];
      const dhp_ct_u32 is_visible = dhp_ct_less_i32((dhp_ct_i32)dhp_ct_splat_u32((uint32_t)key), limit);
      store(p, dhp_ct_select(is_visible, load(p), minus_infinity));
    }
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

    const lanes_f32 before = load(&scratch->maximum[query]);
    const lanes_f32 after = dhp_ct_max(before, highest);
    const lanes_f32 shift = shift_of(after);
    /* before the first finite score the sum is 0, and 0 times inf would not be */
    const dhp_ct_u32 is_first = dhp_ct_equal_u32(dhp_ct_bits(before), dhp_ct_bits(minus_infinity));
    const lanes_f32 rescale = dhp_ct_select(is_first, dhp_ct_splat(0.f), dhp_ct_exp2(shift_of(before) - shift));

    lanes_f32 sum[4] = {dhp_ct_splat(0.f), dhp_ct_splat(0.f), dhp_ct_splat(0.f), dhp_ct_splat(0.f)};
    for (int key = 0; key < n; key += 4)
      UNROLL for (int u = 0; u < 4; u++) {
        float *const p = &scratch->p[key + u][query];
        const lanes_f32 x = dhp_ct_exp2(load(p) - shift);
        sum[u] += x;
        store(p, x);
      }
    store(&scratch->maximum[query], after);
    store(&scratch->rescale[query], rescale);
    const lanes_f32 tile_sum = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    store(&scratch->sum[query], dhp_ct_fma(load(&scratch->sum[query]), rescale, tile_sum));
  }
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

/* partial[row..][d..] += p v over keys [from, to); from 0 begins at zero. CT: bounds are public. */
/* clang-format off */
DHP_CT void value_block(dhp_cpu_scratch *scratch, int row, int d, int from, int to, const int rows, const int vectors) {
  lanes_f32 sum[VALUE_ROWS][VALUE_VECTORS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int i = 0; i < vectors; i++)
      sum[r][i] = from == 0 ? dhp_ct_splat(0.f) : load(&scratch->partial[row + r][d + i * LANES]);
  for (int key = from; key < to; key++) {
    lanes_f32 v[VALUE_VECTORS];
    UNROLL for (int i = 0; i < vectors; i++) v[i] = load(&scratch->v[key][d + i * LANES]);
    UNROLL for (int r = 0; r < rows; r++) {
      const lanes_f32 p = dhp_ct_splat(scratch->p[key][row + r]);
      UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = dhp_ct_fma(p, v[i], sum[r][i]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int i = 0; i < vectors; i++)
      store(&scratch->partial[row + r][d + i * LANES], sum[r][i]);
}
/* clang-format on */

DHP_CT void value_rows(dhp_cpu_scratch *scratch, int row, int width, int from, int to, const int rows) {
  int d = 0;
  for (; d + VALUE_VECTORS * LANES <= width; d += VALUE_VECTORS * LANES)
    value_block(scratch, row, d, from, to, rows, VALUE_VECTORS);
  for (; d < width; d += LANES)
    value_block(scratch, row, d, from, to, rows, 1);
}

/*
 * out = out * rescale + p v. Rows of a block take the keys they all see together, then each the few that only it and
 * later rows see: bounds grow from row to row. The tile's part is summed by itself first, which keeps rounding small
 * over long sequences.
 */
static void add_values(dhp_cpu_scratch *scratch, const int32_t bound[DHP_CPU_TILE_Q], int rows, int width) {
  int row = 0;
  while (row < rows && bound[row] == 0)
    row++;
  while (row < rows) {
    const int is_block = row + VALUE_ROWS <= rows, last = is_block ? row + VALUE_ROWS : row + 1, shared = bound[row];
    if (is_block)
      value_rows(scratch, row, width, 0, shared, VALUE_ROWS);
    else
      value_rows(scratch, row, width, 0, shared, 1);
    for (; row < last; row++) {
      if (shared < bound[row]) value_rows(scratch, row, width, shared, bound[row], 1);
      const lanes_f32 rescale = dhp_ct_splat(scratch->rescale[row]);
      for (int d = 0; d < width; d += LANES) {
        float *const out = &scratch->out[row][d];
        store(out, dhp_ct_fma(load(out), rescale, load(&scratch->partial[row][d])));
      }
    }
  }
}

/* ---- one tile of rows ------------------------------------------------------------------------------------------ */

/* out / sum and lse. Rows that see no key (public) get 0 and -inf. */
static void write_results(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch, int queries) {
  const dhp_attention *const args = rows->args;
  const dhp_tensor *const out = &args->out;
  const int head_dim = (int)out->size[3];
  const lanes_f32 ln2 = dhp_ct_splat(0.69314718f);
  for (int query = 0; query < queries; query += LANES) {
    const lanes_f32 sum = load(&scratch->sum[query]);
    const lanes_f32 lse = dhp_ct_fma(shift_of(load(&scratch->maximum[query])), ln2, dhp_ct_log(sum));
    store(&scratch->lse[query], dhp_ct_canonical(lse));
    store(&scratch->rescale[query], dhp_ct_reciprocal(sum)); /* of a zero sum: inf, and 0 * inf is the NaN of 0 / 0 */
  }
  for (int i = 0; i < rows->count; i++) {
    const lanes_f32 factor = dhp_ct_splat(scratch->rescale[i]);
    char *const row = row_pointer(out, rows->batch, rows->head, rows->first + i);
    if (visible_keys(args, rows->first + i) == 0) {
      memset(row, 0, (size_t)head_dim * element_size(out->dtype));
      scratch->lse[i] = -__builtin_inff();
    } else {
      switch (out->dtype) {
      case DHP_FLOAT32: write_row(row, scratch->out[i], factor, head_dim, DHP_FLOAT32, scratch); break;
      case DHP_FLOAT16: write_row(row, scratch->out[i], factor, head_dim, DHP_FLOAT16, scratch); break;
      case DHP_BFLOAT16: write_row(row, scratch->out[i], factor, head_dim, DHP_BFLOAT16, scratch); break;
      }
    }
  }
  if (args->lse) {
    const int64_t first = (rows->batch * out->size[1] + rows->head) * out->size[2] + rows->first;
    memcpy(args->lse + first, scratch->lse, (size_t)rows->count * sizeof(float));
  }
}

void DHP_ATTEND(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch) {
  const dhp_attention *const args = rows->args;
  const int head_dim = (int)args->q.size[3];
  const int width = round_up(head_dim, LANES), queries = round_up(rows->count, LANES);
  const int64_t key_head = rows->head / (args->q.size[1] / args->k.size[1]);

  read_queries(rows, queries, scratch);
  for (int i = 0; i < queries; i += LANES) {
    store(scratch->maximum + i, dhp_ct_splat(-__builtin_inff()));
    store(scratch->sum + i, dhp_ct_splat(0.f));
  }
  for (int i = 0; i < rows->count; i++)
    for (int d = 0; d < width; d += LANES)
      store(scratch->out[i] + d, dhp_ct_splat(0.f));

  int64_t visible[DHP_CPU_TILE_Q]; /* lanes without a row copy the last row */
  for (int i = 0; i < DHP_CPU_TILE_Q; i++)
    visible[i] = visible_keys(args, rows->first + (i < rows->count ? i : rows->count - 1));
  const int64_t keys = visible[rows->count - 1]; /* beyond them no row sees anything */

  for (int64_t start = 0; start < keys; start += DHP_CPU_TILE_K) {
    const int n = keys - start < DHP_CPU_TILE_K ? (int)(keys - start) : DHP_CPU_TILE_K;
    int32_t bound[DHP_CPU_TILE_Q]; /* visible keys of this tile */
    for (int i = 0; i < DHP_CPU_TILE_Q; i++) {
      const int64_t left = visible[i] - start;
      bound[i] = left < 0 ? 0 : left < n ? (int32_t)left : n;
    }
    read_rows(scratch->k, &args->k, rows->batch, key_head, start, n, scratch);
    read_rows(scratch->v, &args->v, rows->batch, key_head, start, n, scratch);
    for (int i = n; i < round_up(n, SCORE_KEYS); i++)
      memset(scratch->k[i], 0, sizeof scratch->k[i]);

    compute_scores(scratch, queries, n, head_dim);
    hide_scores(scratch, bound, queries, bound[0], round_up(n, 4));
    softmax(scratch, queries, round_up(n, 4));
    add_values(scratch, bound, rows->count, width);
  }
  write_results(rows, scratch, queries);
}
