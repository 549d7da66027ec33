#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* ---- numbers --------------------------------------------------------------------------------------------------- */

typedef struct format {
  int exponent_bits, mantissa_bits;
} format;

static format format_of(dhp_dtype dtype) {
  switch (dtype) {
  case DHP_FLOAT16: return (format){5, 10};
  case DHP_BFLOAT16: return (format){8, 7};
  case DHP_FLOAT32: break;
  case DHP_FLOAT64: abort(); /* needs no conversion */
  }
  return (format){8, 23};
}

static size_t size_of(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2; }

double value_of(dhp_dtype dtype, uint32_t bits) {
  const format f = format_of(dtype);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1u);
  const int exponent = (int)(bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const double sign = bits >> (f.exponent_bits + f.mantissa_bits) ? -1.0 : 1.0;
  if (exponent == 2 * bias + 1) return mantissa ? (double)NAN : sign * HUGE_VAL;
  if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * ldexp(mantissa + (1u << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

uint32_t nearest_bits(dhp_dtype dtype, double value) {
  const format f = format_of(dtype);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << f.exponent_bits) - 1u) << f.mantissa_bits;
  const uint32_t sign = signbit(value) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0u;
  if (isnan(value)) return infinity | 1u << (f.mantissa_bits - 1);
  if (isinf(value)) return sign | infinity;
  if (value == 0.0) return sign;
  int exponent = ilogb(value) < 1 - bias ? 1 - bias : ilogb(value);
  /* In units of the last place: a float64 operation that is exact but for the rounding wanted. */
  const double units = nearbyint(ldexp(fabs(value), f.mantissa_bits - exponent));
  const uint32_t hidden = 1u << f.mantissa_bits;
  if (units < hidden) return sign | (uint32_t)units; /* subnormal */
  const uint32_t magnitude = ((uint32_t)(exponent + bias) << f.mantissa_bits) + ((uint32_t)units - hidden);
  return sign | (magnitude < infinity ? magnitude : infinity);
}

/* ---- problems -------------------------------------------------------------------------------------------------- */

storage storage_new(dhp_tensor *t) {
  int64_t last = 0;
  for (int i = 0; i < 4; i++)
    last += t->size[i] > 0 ? (t->size[i] - 1) * t->stride[i] : 0;
  const storage s = {.size = (size_t)(last + 1) * size_of(t->dtype),
                     .data = malloc((size_t)(last + 1) * size_of(t->dtype))};
  if (!s.data) abort();
  t->data = s.data;
  return s;
}

dhp_tensor strided(int64_t b, int64_t h, int64_t s, int64_t d, dhp_dtype dtype, memory_layout layout) {
  dhp_tensor t = {.size = {b, h, s, d}, .dtype = dtype, .stride = {h * s * d, s * d, d, 1}};
  if (layout == TRANSPOSED) {
    t.stride[0] = s * h * d;
    t.stride[1] = d;
    t.stride[2] = h * d;
  } else if (layout == GAPS) {
    t.stride[2] = d + 3;
    t.stride[1] = s * t.stride[2] + 5;
    t.stride[0] = h * t.stride[1] + 7;
  }
  return t;
}

static void write_element(dhp_dtype dtype, unsigned char *to, double value) {
  if (dtype == DHP_FLOAT64) {
    memcpy(to, &value, sizeof value);
  } else {
    const uint32_t bits = nearest_bits(dtype, value);
    memcpy(to, &bits, size_of(dtype)); /* little endian */
  }
}

void fill_normal(const dhp_tensor *t, storage memory) {
  for (size_t i = 0; i < memory.size / size_of(t->dtype); i++)
    write_element(t->dtype, memory.data + i * size_of(t->dtype), random_normal());
}

problem problem_new(shape s, dhp_dtype dtype, memory_layout layout) {
  problem p = {.args = {.is_causal = s.is_causal,
                        .causal_offset = s.causal_offset,
                        .scale = (float)(1.0 / sqrt((double)s.head_dim)),
                        .q = strided(s.batch, s.heads, s.queries, s.head_dim, dtype, layout),
                        .k = strided(s.batch, s.key_heads, s.keys, s.head_dim, dtype, layout),
                        .v = strided(s.batch, s.key_heads, s.keys, s.head_dim, dtype, layout),
                        .out = strided(s.batch, s.heads, s.queries, s.head_dim, dtype, layout)}};
  if (layout == EXPANDED) p.args.q.stride[1] = p.args.k.stride[0] = p.args.v.stride[0] = 0;
  p.q = storage_new(&p.args.q);
  p.k = storage_new(&p.args.k);
  p.v = storage_new(&p.args.v);
  p.out = storage_new(&p.args.out);
  p.lse_size = (size_t)(s.batch * s.heads * s.queries) * (dtype == DHP_FLOAT64 ? sizeof(double) : sizeof(float));
  p.lse = malloc(p.lse_size);
  if (!p.lse) abort();
  p.args.lse = p.lse;
  p.mask = dhp_mask_of(&p.args);
  p.places.lse_pitch = s.queries;
  fill_normal(&p.args.q, p.q);
  fill_normal(&p.args.k, p.k);
  fill_normal(&p.args.v, p.v);
  problem_poison(&p);
  return p;
}

void problem_free(problem *p) {
  free(p->q.data);
  free(p->k.data);
  free(p->v.data);
  free(p->out.data);
  free(p->lse);
}

void problem_poison(problem *p) {
  memset(p->out.data, 0xa5, p->out.size);
  memset(p->lse, 0xa5, p->lse_size);
}

static unsigned char *element(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  const int64_t offset = b * t->stride[0] + h * t->stride[1] + s * t->stride[2] + d * t->stride[3];
  return (unsigned char *)t->data + offset * (int64_t)size_of(t->dtype);
}

int gaps_touched(const dhp_tensor *t, storage memory) {
  unsigned char *const covered = calloc(memory.size, 1);
  if (!covered) abort();
  for (int64_t b = 0; b < t->size[0]; b++)
    for (int64_t h = 0; h < t->size[1]; h++)
      for (int64_t s = 0; s < t->size[2]; s++)
        memset(covered + (element(t, b, h, s, 0) - memory.data), 1, (size_t)t->size[3] * size_of(t->dtype));
  int touched = 0;
  for (size_t i = 0; i < memory.size; i++)
    touched += !covered[i] && memory.data[i] != 0xa5;
  free(covered);
  return touched;
}

int problem_gaps_touched(const problem *p) { return gaps_touched(&p->args.out, p->out); }

double problem_lse(const problem *p, int64_t row) {
  return p->args.q.dtype == DHP_FLOAT64 ? ((const double *)(const void *)p->lse)[row] : (double)p->lse[row];
}

uint32_t get_bits(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  uint32_t bits = 0;
  memcpy(&bits, element(t, b, h, s, d), size_of(t->dtype));
  return bits;
}

double get(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  double value;
  if (t->dtype != DHP_FLOAT64) return value_of(t->dtype, get_bits(t, b, h, s, d));
  memcpy(&value, element(t, b, h, s, d), sizeof value);
  return value;
}

void set(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d, double value) {
  write_element(t->dtype, element(t, b, h, s, d), value);
}

int is_visible(const dhp_mask *mask, int64_t i, int64_t j) { return mask->lowest <= j - i && j - i <= mask->highest; }

/* ---- comparison ------------------------------------------------------------------------------------------------ */

typedef struct norms {
  double error, reference, magnitude;
} norms;

static void compare_number(double got, double expected, comparison *result, double *error) {
  *error = 0.0;
  if (isfinite(got) && isfinite(expected))
    *error = got - expected;
  else if (isnan(expected) ? !isnan(got) : got != expected)
    result->mismatches++;
}

double *decode(const dhp_tensor *t) {
  const int64_t *const n = t->size;
  double *const values = malloc((size_t)(n[0] * n[1] * n[2] * n[3] + 1) * sizeof *values);
  if (!values) abort();
  for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++)
    values[i] = get(t, i / (n[3] * n[2] * n[1]), i / (n[3] * n[2]) % n[1], i / n[3] % n[2], i % n[3]);
  return values;
}

/* q and out: one row; k and v: all rows of their head; p: room for a number per key. */
static void compare_row(const problem *whole, int64_t i, const double *q, const double *k, const double *v,
                        const double *out, double lse, double *p, comparison *result, norms *totals) {
  const int64_t keys = whole->args.k.size[2], head_dim = whole->args.q.size[3];
  double maximum = -HUGE_VAL, sum = 0.0, error;
  int visible = 0;
  for (int64_t j = 0; j < keys; j++) {
    if (!is_visible(&whole->mask, i, j)) continue;
    visible++;
    p[j] = 0.0;
    for (int64_t d = 0; d < head_dim; d++)
      p[j] += q[d] * k[j * head_dim + d];
    p[j] *= (double)whole->args.scale;
    if (p[j] > maximum) maximum = p[j];
  }
  const double shift = isinf(maximum) ? 0.0 : maximum; /* an infinite score stays what it is: exp(inf) = inf */
  for (int64_t j = 0; j < keys; j++)
    if (is_visible(&whole->mask, i, j)) sum += p[j] = exp(p[j] - shift);

  for (int64_t d = 0; d < head_dim; d++) {
    double expected = 0.0, magnitude = 0.0;
    for (int64_t j = 0; j < keys; j++) {
      if (!is_visible(&whole->mask, i, j)) continue;
      expected += p[j] * v[j * head_dim + d];
      magnitude += p[j] * fabs(v[j * head_dim + d]);
    }
    expected = visible ? expected / sum : 0.0;
    compare_number(out[d], expected, result, &error);
    totals->error += error * error;
    if (isfinite(expected)) {
      totals->reference += expected * expected;
      totals->magnitude += visible ? magnitude / sum * (magnitude / sum) : 0.0;
    }
  }
  const double expected = shift + log(sum);
  compare_number(lse, expected, result, &error);
  result->lse = fmax(result->lse, fabs(error) / fmax(1.0, fabs(expected)));
}

comparison compare(const problem *whole) {
  const dhp_attention *const args = &whole->args;
  comparison result = {0};
  norms totals = {0};
  const int64_t *const n = args->q.size, key_heads = args->k.size[1], keys = args->k.size[2];
  double *const q = decode(&args->q), *const k = decode(&args->k), *const v = decode(&args->v);
  double *const out = decode(&args->out), *const p = malloc((size_t)(keys + 1) * sizeof *p);
  if (!p) abort();
  for (int64_t row = 0; row < n[0] * n[1] * n[2]; row++) {
    const int64_t b = row / (n[1] * n[2]), h = row / n[2] % n[1];
    const int64_t head = (b * key_heads + h / (n[1] / key_heads)) * keys * n[3];
    compare_row(whole, row % n[2], q + row * n[3], k + head, v + head, out + row * n[3], problem_lse(whole, row), p,
                &result, &totals);
  }
  free(q);
  free(k);
  free(v);
  free(out);
  free(p);
  result.relative = totals.error > 0.0 ? sqrt(totals.error / totals.reference) : 0.0;
  result.conditioned = totals.error > 0.0 ? sqrt(totals.error / totals.magnitude) : 0.0;
  return result;
}
