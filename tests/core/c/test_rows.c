/* test_rows.c - an output row depends on its query row and on what it may see, and on nothing else; NaN and infinity.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "reference.h"
#include "test_cpu.h"

static size_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT32 ? 4 : 2; }

static void move(dhp_tensor *t, int64_t b, int64_t h, int64_t s) {
  t->data =
      (char *)t->data + (b * t->stride[0] + h * t->stride[1] + s * t->stride[2]) * (int64_t)element_size(t->dtype);
}

/* ---- row invariance -------------------------------------------------------------------------------------------- */

/* Row (b, h, i) of p by itself: one query; its keys cut off behind the last visible one, or hidden by the mask. */
static void check_row_alone(const dhp_cpu_kernel *kernel, const problem *p, int64_t b, int64_t h, int64_t i, int cut) {
  float lse = 0.f;
  problem alone = *p;
  dhp_attention *const args = &alone.args;
  args->lse = &lse;
  unsigned char row[256 * sizeof(float)];
  move(&args->q, b, h, i);
  move(&args->k, b, h / (args->q.size[1] / args->k.size[1]), 0);
  move(&args->v, b, h / (args->q.size[1] / args->k.size[1]), 0);
  args->out.data = row;
  args->q.size[0] = args->k.size[0] = args->v.size[0] = args->out.size[0] = 1;
  args->q.size[1] = args->k.size[1] = args->v.size[1] = args->out.size[1] = 1;
  args->q.size[2] = args->out.size[2] = 1;
  if (cut) args->k.size[2] = args->v.size[2] = dhp_mask_row(&p->mask, i).last;
  alone.mask = dhp_mask_band(1, args->k.size[2], p->mask.lowest + i, p->mask.highest + i);
  run_kernel(kernel, &alone);
  dhp_tensor there = p->args.out;
  move(&there, b, h, i);
  const float lse_there = p->lse[(b * p->args.q.size[1] + h) * p->args.q.size[2] + i];
  check(memcmp(row, there.data, (size_t)there.size[3] * element_size(there.dtype)) == 0 &&
            memcmp(&lse, &lse_there, sizeof lse) == 0,
        "%s, dtype %d, D=%d, cut=%d: row (%d, %d, %d) has other bits alone", kernel->instructions, (int)there.dtype,
        (int)there.size[3], cut, (int)b, (int)h, (int)i);
}

static void test_invariance(void) {
  check_group("a row alone has the bits it has in a prefill");
  static const int head_dims[] = {5, 64, 72, 130};
  /* The bounds of a full mask, a causal one, and windows that are narrower and wider than a block of rows. */
  static const int64_t bands[][2] = {{INT64_MIN, INT64_MAX}, {INT64_MIN, 30}, {20, 22}, {-40, 60}};
  for (int i = 0; i < 4; i++)
    for (int t = DHP_FLOAT32; t <= DHP_BFLOAT16; t++)
      for (int band = 0; band < 4; band++) {
        problem p = problem_new((shape){2, 4, 2, 150, 210, head_dims[i], 0, 0}, (dhp_dtype)t, TRANSPOSED);
        p.mask = dhp_mask_band(150, 210, bands[band][0], bands[band][1]);
        for (int k = 0; k < test_kernel_count; k++) {
          run_kernel(&test_kernels[k], &p);
          for (int row = 0; row < 150; row += 1 + random_below(12))
            check_row_alone(&test_kernels[k], &p, random_below(2), random_below(4), row, row % 2);
        }
        problem_free(&p);
      }
}

static void test_invariance_over_segments(void) {
  check_group("a row that sees several segments has the same bits alone");
  enum { SEGMENT = DHP_SEGMENT_KEYS, KEYS = 2 * SEGMENT + 200 };
  static const int64_t bands[][2] = {
      {INT64_MIN, INT64_MAX},
      {INT64_MIN, SEGMENT - 70},             /* causal: late rows alone see the second segment */
      {SEGMENT - 100, SEGMENT + 20},         /* early rows see nothing but the first segment */
      {SEGMENT - 40, 2 * SEGMENT - 60},      /* from the first segment or the second to the second or the third */
      {SEGMENT + 1000, 2 * SEGMENT + 1000}}; /* from the middle of a segment to the end */
  for (int t = DHP_FLOAT32; t <= DHP_BFLOAT16; t++)
    for (int band = 0; band < 5; band++) {
      problem p = problem_new((shape){1, 2, 1, 150, KEYS, 5 + 8 * t, 0, 0}, (dhp_dtype)t, TRANSPOSED);
      p.mask = dhp_mask_band(150, KEYS, bands[band][0], bands[band][1]);
      for (int k = 0; k < test_kernel_count; k++) {
        run_kernel(&test_kernels[k], &p);
        for (int row = random_below(8); row < 150; row += 1 + random_below(20))
          check_row_alone(&test_kernels[k], &p, 0, random_below(2), row, row % 2);
      }
      problem_free(&p);
    }
}

/* A row of the second segment alone whose sum falls below the smallest number from below, beside rows of both. */
static void test_negative_zero_over_segments(void) {
  check_group("a row's negative zero is there beside rows that see another segment");
  enum { SEGMENT = DHP_SEGMENT_KEYS, KEYS = SEGMENT + 201, QUERIES = 6 };
  problem p = problem_new((shape){1, 1, 1, QUERIES, KEYS, 1, 0, 0}, DHP_FLOAT32, CONTIGUOUS);
  p.mask = dhp_mask_band(QUERIES, KEYS, SEGMENT - 3, KEYS);
  for (int i = 0; i < QUERIES; i++)
    set(&p.args.q, 0, 0, i, 0, 1.0);
  for (int j = 0; j < KEYS; j++) {
    set(&p.args.k, 0, 0, j, 0, j == KEYS - 1 ? 10.0 : 0.0);
    set(&p.args.v, 0, 0, j, 0, j == SEGMENT + 10 ? -0x1p-126 : 0.0);
  }
  for (int k = 0; k < test_kernel_count; k++) {
    run_kernel(&test_kernels[k], &p);
    check_row_alone(&test_kernels[k], &p, 0, 0, QUERIES - 1, 0);
    const int is_fused = strcmp(test_kernels[k].instructions, "baseline") != 0; /* else -0 + 0 is 0 */
    check(!is_fused || get_bits(&p.args.out, 0, 0, QUERIES - 1, 0) == 0x80000000u, "%s: no negative zero to look at",
          test_kernels[k].instructions);
  }
  problem_free(&p);
}

/* ---- what a row may not see ------------------------------------------------------------------------------------ */

static void test_hidden(void) {
  check_group("hidden keys and values do not reach a row");
  static const double values[] = {NAN, INFINITY, -INFINITY};
  for (int t = DHP_FLOAT32; t <= DHP_BFLOAT16; t++)
    for (int k = 0; k < test_kernel_count; k++)
      for (int round = 0; round < 12; round++) {
        problem p = problem_new((shape){1, 2, 1, 140, 170, 20, 1, 10}, (dhp_dtype)t, CONTIGUOUS);
        run_kernel(&test_kernels[k], &p);
        unsigned char *const before = malloc(p.out.size);
        if (!before) abort();
        memcpy(before, p.out.data, p.out.size);
        const int bad = 11 + random_below(139); /* keys from here on are hidden from rows up to bad - 11 */
        const dhp_tensor *const poisoned = round % 2 ? &p.args.k : &p.args.v;
        for (int64_t j = bad; j < 170; j++)
          set(poisoned, 0, 0, j, random_below(20), values[round % 3]);
        run_kernel(&test_kernels[k], &p);
        const size_t row = 20 * element_size((dhp_dtype)t), head = 140 * row;
        for (size_t h = 0; h < 2; h++) {
          check(memcmp(before + h * head, p.out.data + h * head, (size_t)(bad - 10) * row) == 0,
                "%s, dtype %d: key %d reached a row before %d", test_kernels[k].instructions, t, bad, bad - 10);
          check(memcmp(before + h * head + (size_t)(bad - 10) * row, p.out.data + h * head + (size_t)(bad - 10) * row,
                       row) != 0,
                "%s, dtype %d: key %d did not reach row %d", test_kernels[k].instructions, t, bad, bad - 10);
        }
        check(compare(&p).mismatches == 0, "%s, dtype %d: differs from the reference", test_kernels[k].instructions, t);
        free(before);
        problem_free(&p);
      }
}

/* ---- NaN and infinity, as in float64 ---------------------------------------------------------------------------- */

/* One head, 4 queries that are all ones, n keys that are all zero; D = 1, so that a key is the score. */
static problem simple_problem(dhp_dtype dtype, int keys) {
  problem p = problem_new((shape){1, 1, 1, 4, keys, 1, 0, 0}, dtype, CONTIGUOUS);
  for (int i = 0; i < 4; i++)
    set(&p.args.q, 0, 0, i, 0, 1.0);
  for (int j = 0; j < keys; j++)
    set(&p.args.k, 0, 0, j, 0, 0.0);
  return p;
}

static void check_outcome(const dhp_cpu_kernel *kernel, problem *p, const char *what, double out, double lse) {
  problem_poison(p);
  run_kernel(kernel, p);
  const double got = get(&p->args.out, 0, 0, 2, 0), got_lse = (double)p->lse[2];
  const double allowed = p->args.out.dtype == DHP_FLOAT32 ? 1e-6 : 8e-3; /* relative; bfloat16's ulp is 2^-7 */
  check((isnan(out) ? get_bits(&p->args.out, 0, 0, 2, 0) == nearest_bits(p->args.out.dtype, out)
                    : got == out || fabs(got - out) <= allowed * fabs(out)) &&
            (isnan(lse) ? isnan(got_lse) : got_lse == lse || fabs(got_lse - lse) <= 1e-6 * fabs(lse)),
        "%s, dtype %d, %s: out %g, lse %g, expected %g, %g", kernel->instructions, (int)p->args.out.dtype, what, got,
        got_lse, out, lse);
  check(compare(p).mismatches == 0, "%s, %s: differs from the reference", kernel->instructions, what);
}

static void test_nonfinite(void) {
  check_group("NaN and infinity in what a row sees");
  for (int t = DHP_FLOAT32; t <= DHP_BFLOAT16; t++)
    for (int k = 0; k < test_kernel_count; k++) {
      const dhp_cpu_kernel *const kernel = &test_kernels[k];
      problem p = simple_problem((dhp_dtype)t, 200);
      for (int j = 0; j < 200; j++)
        set(&p.args.v, 0, 0, j, 0, 2.0);
      check_outcome(kernel, &p, "equal scores", 2.0, log(200.0));
      p.args.scale = 0.f;
      check_outcome(kernel, &p, "scale 0", 2.0, log(200.0));
      p.args.scale = 1.f;

      set(&p.args.k, 0, 0, 150, 0, -INFINITY);
      check_outcome(kernel, &p, "one score of -inf", 2.0, log(199.0));
      for (int j = 0; j < 100; j++)
        set(&p.args.k, 0, 0, j, 0, -INFINITY);
      check_outcome(kernel, &p, "a whole key tile of -inf, then numbers", 2.0, log(99.0));
      p.args.scale = 0.f;
      check_outcome(kernel, &p, "scale 0 times -inf", NAN, NAN);
      p.args.scale = 1.f;
      for (int j = 100; j < 200; j++)
        set(&p.args.k, 0, 0, j, 0, -INFINITY);
      check_outcome(kernel, &p, "all scores -inf", NAN, -INFINITY);
      set(&p.args.k, 0, 0, 0, 0, INFINITY);
      check_outcome(kernel, &p, "a score of +inf, first", NAN, INFINITY);
      set(&p.args.k, 0, 0, 0, 0, 0.0);
      set(&p.args.k, 0, 0, 199, 0, INFINITY);
      check_outcome(kernel, &p, "a score of +inf, last", NAN, INFINITY);
      set(&p.args.k, 0, 0, 199, 0, NAN);
      check_outcome(kernel, &p, "a NaN key", NAN, NAN);
      set(&p.args.k, 0, 0, 199, 0, 0.0);
      set(&p.args.v, 0, 0, 199, 0, INFINITY);
      check_outcome(kernel, &p, "a value of inf", INFINITY, log(2.0));
      set(&p.args.v, 0, 0, 0, 0, -INFINITY);
      check_outcome(kernel, &p, "values of inf and -inf", NAN, log(2.0));
      set(&p.args.v, 0, 0, 0, 0, NAN);
      set(&p.args.v, 0, 0, 199, 0, 1.0);
      check_outcome(kernel, &p, "a NaN value", NAN, log(2.0));
      problem_free(&p);

      problem q = problem_new((shape){1, 1, 1, 40, 40, 30, 0, 0}, (dhp_dtype)t, CONTIGUOUS);
      set(&q.args.q, 0, 0, 3, 29, NAN);
      set(&q.args.q, 0, 0, 17, 0, INFINITY);
      run_kernel(kernel, &q);
      check(compare(&q).mismatches == 0, "%s, dtype %d: NaN and inf in two query rows", kernel->instructions, t);
      int nan_rows = 0;
      for (int i = 0; i < 40; i++)
        nan_rows += isnan(get(&q.args.out, 0, 0, i, 0));
      check(nan_rows == 2, "%s, dtype %d: %d rows are NaN", kernel->instructions, t, nan_rows);
      problem_free(&q);
    }
}

void test_rows(void) {
  test_invariance();
  test_invariance_over_segments();
  test_negative_zero_over_segments();
  test_hidden();
  test_nonfinite();
}
