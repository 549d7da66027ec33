/* test_gradient_rows.c - what a row of dq, dk or dv depends on, and what it does not; NaN and infinity. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"
#include "../test_cpu.h"
#include "gradients.h"

static size_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2; }

static size_t lse_size(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : 4; }

static void *at(const dhp_tensor *t, int64_t b, int64_t h, int64_t s) {
  return (char *)t->data + (b * t->stride[0] + h * t->stride[1] + s * t->stride[2]) * (int64_t)element_size(t->dtype);
}

/* `heads` heads from head h on, `rows` rows from row s on, of one batch. */
static void cut(dhp_tensor *t, int64_t b, int64_t h, int64_t heads, int64_t s, int64_t rows) {
  t->data = at(t, b, h, s);
  t->size[0] = 1;
  t->size[1] = heads;
  t->size[2] = rows;
}

/* ---- row invariance -------------------------------------------------------------------------------------------- */

/* dq of query (b, h, i) of p by itself, among the keys up to the last that it sees. */
static void check_query_alone(const dhp_cpu_kernel *kernel, const gradient_problem *p, int64_t b, int64_t h,
                              int64_t i) {
  unsigned char row[256 * sizeof(double)];
  gradient_problem alone = *p;
  dhp_attention *const forward = &alone.args.forward;
  const int64_t key_head = h / (forward->q.size[1] / forward->k.size[1]);
  const int64_t keys = dhp_mask_row(&p->forward.mask, i).last;
  const size_t n = (size_t)((b * forward->q.size[1] + h) * forward->q.size[2] + i) * lse_size(forward->q.dtype);
  cut(&forward->q, b, h, 1, i, 1);
  cut(&forward->out, b, h, 1, i, 1);
  cut(&alone.args.grad_out, b, h, 1, i, 1);
  cut(&forward->k, b, key_head, 1, 0, keys);
  cut(&forward->v, b, key_head, 1, 0, keys);
  forward->lse = (char *)forward->lse + n;
  alone.args.grad_lse = (const char *)p->args.grad_lse + n;
  alone.forward.mask = dhp_mask_band(1, keys, p->forward.mask.lowest + i, p->forward.mask.highest + i);
  cut(&alone.args.dq, b, h, 1, i, 1);
  alone.args.dq.data = row;
  alone.args.dk.data = alone.args.dv.data = NULL;
  check(gradients_run(kernel, &alone, NULL) == DHP_OK &&
            memcmp(row, at(&p->args.dq, b, h, i), (size_t)forward->q.size[3] * element_size(forward->q.dtype)) == 0,
        "%s, dtype %d, D=%d: dq (%d, %d, %d) has other bits alone", kernel->instructions, (int)forward->q.dtype,
        (int)forward->q.size[3], (int)b, (int)h, (int)i);
}

/* dk and dv of key (b, h, j) of p by itself, with the heads that read it and their queries up to the last that sees it;
 * they must be contiguous in lse, so that there are as many as in p, or one head. */
static void check_key_alone(const dhp_cpu_kernel *kernel, const gradient_problem *p, int64_t b, int64_t h, int64_t j) {
  unsigned char rows[2][256 * sizeof(double)];
  gradient_problem alone = *p;
  dhp_attention *const forward = &alone.args.forward;
  const int64_t group = forward->q.size[1] / forward->k.size[1];
  const dhp_mask by_key = dhp_mask_transposed(&p->forward.mask);
  const int64_t queries = group == 1 ? dhp_mask_row(&by_key, j).last : forward->q.size[2];
  const size_t n = (size_t)((b * forward->q.size[1] + h * group) * forward->q.size[2]) * lse_size(forward->q.dtype);
  cut(&forward->q, b, h * group, group, 0, queries);
  cut(&forward->out, b, h * group, group, 0, queries);
  cut(&alone.args.grad_out, b, h * group, group, 0, queries);
  cut(&forward->k, b, h, 1, j, 1);
  cut(&forward->v, b, h, 1, j, 1);
  forward->lse = (char *)forward->lse + n;
  alone.args.grad_lse = (const char *)p->args.grad_lse + n;
  alone.forward.mask = dhp_mask_band(queries, 1, p->forward.mask.lowest - j, p->forward.mask.highest - j);
  alone.args.dq.data = NULL;
  cut(&alone.args.dk, b, h, 1, j, 1);
  cut(&alone.args.dv, b, h, 1, j, 1);
  alone.args.dk.data = rows[0];
  alone.args.dv.data = rows[1];
  const size_t size = (size_t)forward->k.size[3] * element_size(forward->k.dtype);
  check(gradients_run(kernel, &alone, NULL) == DHP_OK && memcmp(rows[0], at(&p->args.dk, b, h, j), size) == 0 &&
            memcmp(rows[1], at(&p->args.dv, b, h, j), size) == 0,
        "%s, dtype %d, D=%d: dk or dv (%d, %d, %d) has other bits alone", kernel->instructions, (int)forward->q.dtype,
        (int)forward->q.size[3], (int)b, (int)h, (int)j);
}

static void test_invariance(void) {
  check_group("gradients of a row alone have the bits they have in a batch");
  static const int head_dims[] = {5, 64, 130};
  static const int64_t bands[][2] = {{INT64_MIN, INT64_MAX}, {INT64_MIN, 30}, {20, 22}, {-40, 60}};
  for (int i = 0; i < 3; i++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
      for (int band = 0; band < 4; band++) {
        const int key_heads = band % 2 ? 4 : 2;
        gradient_problem p = gradients_new_band((shape){2, 4, key_heads, 150, 210, head_dims[i], 0, 0}, bands[band][0],
                                                bands[band][1], (dhp_dtype)dtype, TRANSPOSED);
        for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++) {
          check(gradients_run(&test_kernels[k], &p, NULL) == DHP_OK, "%s", test_kernels[k].instructions);
          for (int row = 0; row < 150; row += 1 + random_below(20))
            check_query_alone(&test_kernels[k], &p, random_below(2), random_below(4), row);
          for (int row = 0; row < 210; row += 1 + random_below(28))
            check_key_alone(&test_kernels[k], &p, random_below(2), random_below(key_heads), row);
        }
        gradients_free(&p);
      }
}

/* ---- what is hidden -------------------------------------------------------------------------------------------- */

/* Rows [first, last) of a head that differ between two memories of the tensor's layout. */
static int rows_changed(const dhp_tensor *t, const unsigned char *before, const unsigned char *now, int64_t h,
                        int64_t first, int64_t last) {
  int changed = 0;
  for (int64_t s = first; s < last; s++) {
    const size_t from = (size_t)(h * t->stride[1] + s * t->stride[2]) * element_size(t->dtype);
    changed += memcmp(before + from, now + from, (size_t)t->size[3] * element_size(t->dtype)) != 0;
  }
  return changed;
}

static void set_rows(const dhp_tensor *t, int64_t first, int64_t last, double value) {
  for (int64_t h = 0; h < t->size[1]; h++)
    for (int64_t s = first; s < last; s++)
      set(t, 0, h, s, random_below((int)t->size[3]), value);
}

/* Query i sees the keys up to i + 10; poisoned are keys from `bad` on, or queries before it. */
static void check_hidden(const dhp_cpu_kernel *kernel, gradient_problem *p, int round, double value) {
  const int64_t bad = 11 + random_below(120);
  const dhp_attention *const forward = &p->args.forward;
  const dhp_tensor *const poisoned[] = {&forward->k, &forward->v, &forward->q, &p->args.grad_out, &forward->out};
  unsigned char *before[3];
  check(gradients_run(kernel, p, NULL) == DHP_OK, "%s", kernel->instructions);
  for (int i = 0; i < 3; i++) {
    before[i] = malloc(p->gradients[i].size);
    if (!before[i]) abort();
    memcpy(before[i], p->gradients[i].data, p->gradients[i].size);
  }
  if (round % 6 < 5) set_rows(poisoned[round % 6], round % 6 < 2 ? bad : 0, round % 6 < 2 ? 170 : bad, value);
  for (int64_t i = 0; round % 6 == 5 && i < bad; i++)
    for (int h = 0; h < 2; h++) {
      if (forward->q.dtype == DHP_FLOAT64)
        ((double *)forward->lse)[h * 140 + i] = value;
      else
        ((float *)forward->lse)[h * 140 + i] = (float)value;
    }
  check(gradients_run(kernel, p, NULL) == DHP_OK, "%s", kernel->instructions);
  if (round % 6 < 2) { /* queries before bad - 10 do not see the keys, and the next one does */
    for (int h = 0; h < 2; h++)
      check(rows_changed(&p->args.dq, before[0], p->gradients[0].data, h, 0, bad - 10) == 0 &&
                rows_changed(&p->args.dq, before[0], p->gradients[0].data, h, bad - 10, 140) > 0,
            "%s, dtype %d, round %d: dq", kernel->instructions, (int)forward->q.dtype, round);
  } else { /* keys from bad + 10 on are not seen by the queries, and the one before them is */
    check(rows_changed(&p->args.dk, before[1], p->gradients[1].data, 0, bad + 10, 170) == 0 &&
              rows_changed(&p->args.dv, before[2], p->gradients[2].data, 0, bad + 10, 170) == 0 &&
              rows_changed(&p->args.dk, before[1], p->gradients[1].data, 0, bad + 9, bad + 10) == 1,
          "%s, dtype %d, round %d: dk, dv", kernel->instructions, (int)forward->q.dtype, round);
  }
  for (int i = 0; i < 3; i++)
    free(before[i]);
}

static void test_hidden(void) {
  check_group("hidden rows do not reach a gradient");
  static const double values[] = {NAN, INFINITY, -INFINITY};
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++)
      for (int round = 0; round < 18; round++) {
        gradient_problem p = gradients_new((shape){1, 2, 1, 140, 170, 20, 1, 10}, (dhp_dtype)dtype, CONTIGUOUS);
        check_hidden(&test_kernels[k], &p, round, values[round / 6]);
        gradients_free(&p);
      }
}

/* ---- NaN and infinity, as in float64 ---------------------------------------------------------------------------- */

/* The bits of a NaN say nothing. */
static int odd_nans(const dhp_tensor *t) {
  int odd = 0;
  for (int64_t row = 0; row < t->size[1] * t->size[2]; row++)
    for (int64_t d = 0; d < t->size[3]; d++) {
      const int64_t h = row / t->size[2], s = row % t->size[2];
      const double x = get(t, 0, h, s, d);
      uint64_t bits = 0;
      memcpy(&bits, (char *)at(t, 0, h, s) + (size_t)d * element_size(t->dtype), element_size(t->dtype));
      odd += isnan(x) && bits != (t->dtype == DHP_FLOAT64 ? 0x7ff8000000000000u : nearest_bits(t->dtype, x));
    }
  return odd;
}

static void check_nonfinite(const dhp_cpu_kernel *kernel, gradient_problem *p, const char *what) {
  gradients_forward(p);
  gradients_poison(p);
  check(gradients_run(kernel, p, NULL) == DHP_OK, "%s", kernel->instructions);
  gradient_comparison results[3];
  gradients_compare(p, results);
  for (int i = 0; i < 3; i++)
    check(results[i].mismatches == 0 && odd_nans(gradient(p, i)) == 0, "%s, dtype %d, %s: %s has %d mismatches",
          kernel->instructions, (int)p->args.forward.q.dtype, what, gradient_names[i], results[i].mismatches);
}

static void check_kernel_nonfinite(const dhp_cpu_kernel *kernel, dhp_dtype dtype) {
  static const double values[] = {NAN, INFINITY, -INFINITY};
  static const char *const names[] = {"in q", "in k", "in v", "in grad_out"};
  for (int round = 0; round < 24; round++) {
    gradient_problem p = gradients_new((shape){1, 2, 1, 40, 50, 12, round % 2, 7}, dtype, CONTIGUOUS);
    const dhp_tensor *const tensors[] = {&p.args.forward.q, &p.args.forward.k, &p.args.forward.v, &p.args.grad_out};
    const dhp_tensor *const t = tensors[round % 4];
    for (int n = 0; n < 2; n++)
      set(t, 0, 0, random_below((int)t->size[2]), random_below(12), values[round / 8]);
    check_nonfinite(kernel, &p, names[round % 4]);
    gradients_free(&p);
  }
  gradient_problem p = gradients_new((shape){1, 1, 1, 30, 200, 1, 0, 0}, dtype, CONTIGUOUS);
  for (int i = 0; i < 30; i++)
    set(&p.args.forward.q, 0, 0, i, 0, 1.0);
  for (int j = 0; j < 199; j++)
    set(&p.args.forward.k, 0, 0, j, 0, -INFINITY);
  check_nonfinite(kernel, &p, "all scores but one -inf");
  set(&p.args.forward.k, 0, 0, 199, 0, -INFINITY);
  check_nonfinite(kernel, &p, "all scores -inf");
  set(&p.args.forward.k, 0, 0, 100, 0, INFINITY);
  check_nonfinite(kernel, &p, "a score of +inf");
  p.args.forward.scale = p.forward.args.scale = 0.f;
  check_nonfinite(kernel, &p, "scale 0 times inf");
  if (dtype == DHP_FLOAT64)
    ((double *)p.grad_lse)[3] = NAN;
  else
    ((float *)p.grad_lse)[3] = NAN;
  for (int j = 0; j < 200; j++)
    set(&p.args.forward.k, 0, 0, j, 0, 1.0);
  check_nonfinite(kernel, &p, "in grad_lse");
  gradients_free(&p);
}

static void test_nonfinite(void) {
  check_group("gradients: NaN and infinity in what is seen");
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++)
      check_kernel_nonfinite(&test_kernels[k], (dhp_dtype)dtype);
}

void test_gradient_rows(void) {
  test_invariance();
  test_hidden();
  test_nonfinite();
}
