/* test_attention.c - the values of out and lse, against the float64 definition. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "reference.h"
#include "test_cpu.h"

static const dhp_dtype dtypes[] = {DHP_FLOAT32, DHP_FLOAT16, DHP_BFLOAT16};

double tolerance(dhp_dtype dtype) { return dtype == DHP_FLOAT32 ? 1e-6 : dtype == DHP_FLOAT16 ? 5e-4 : 4e-3; }

/* Every kernel on one problem; the reference is computed for each, since it reads the output. */
static void check_shape(shape s, dhp_dtype dtype, memory_layout layout) {
  problem p = problem_new(s, dtype, layout);
  for (int i = 0; i < test_kernel_count; i++) {
    problem_poison(&p);
    run_kernel(&test_kernels[i], &p);
    const comparison result = compare(&p);
    check(result.conditioned <= tolerance(dtype) && result.lse <= 2e-6 && result.mismatches == 0 &&
              problem_gaps_touched(&p) == 0,
          "%s, dtype %d, layout %d, B=%d Hq=%d Hk=%d Sq=%d Sk=%d D=%d causal=%d offset=%lld: error %.2e, lse %.2e, "
          "%d mismatches, %d bytes of gaps",
          test_kernels[i].instructions, (int)dtype, (int)layout, (int)s.batch, (int)s.heads, (int)s.key_heads,
          (int)s.queries, (int)s.keys, (int)s.head_dim, s.is_causal, (long long)s.causal_offset, result.conditioned,
          result.lse, result.mismatches, problem_gaps_touched(&p));
  }
  problem_free(&p);
}

static void check_all_dtypes(shape s, memory_layout layout) {
  for (int i = 0; i < 3; i++)
    check_shape(s, dtypes[i], layout);
}

static void test_shapes(void) {
  check_group("lengths and head_dim");
  static const int head_dims[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 80, 127, 128, 129, 200, 255, 256};
  for (int i = 0; i < (int)(sizeof head_dims / sizeof *head_dims); i++)
    for (int causal = 0; causal < 2; causal++)
      check_all_dtypes((shape){1, 1, 1, 1 + random_below(9), 1 + random_below(120), head_dims[i], causal, 5},
                       CONTIGUOUS);
  /* Around the tiles of 128 queries and 96 keys, and the register blocks inside them. */
  static const int lengths[][2] = {{1, 1},   {1, 95},   {1, 96},   {1, 97},    {3, 193},   {16, 4},   {17, 5},
                                   {31, 64}, {64, 64},  {65, 127}, {127, 12},  {128, 96},  {129, 97}, {130, 130},
                                   {64, 1},  {257, 33}, {12, 300}, {100, 192}, {131, 288}, {200, 200}};
  for (int i = 0; i < (int)(sizeof lengths / sizeof *lengths); i++)
    for (int causal = 0; causal < 2; causal++) {
      const int queries = lengths[i][0], keys = lengths[i][1];
      check_all_dtypes((shape){1, 1, 1, queries, keys, 1 + random_below(40), causal, keys - queries}, CONTIGUOUS);
    }

  check_group("grouped heads and layouts");
  static const int heads[][2] = {{1, 1}, {2, 2}, {4, 2}, {6, 2}, {5, 1}};
  for (int i = 0; i < 5; i++)
    for (int layout = CONTIGUOUS; layout <= EXPANDED; layout++)
      check_all_dtypes((shape){2, heads[i][0], heads[i][1], 1 + random_below(20), 1 + random_below(110),
                               1 + random_below(70), i % 2, random_below(60)},
                       (memory_layout)layout);
}

static void test_causal_offsets(void) {
  check_group("causal offsets and rows that see nothing");
  static const int64_t offsets[] = {0,
                                    1,
                                    -1,
                                    7,
                                    -7,
                                    50,
                                    -50,
                                    95,
                                    96,
                                    97,
                                    -96,
                                    119,
                                    120,
                                    121,
                                    500,
                                    -500,
                                    -139,
                                    -140,
                                    INT64_MAX,
                                    INT64_MIN,
                                    INT64_MAX - 70,
                                    INT64_MIN + 70};
  for (int i = 0; i < (int)(sizeof offsets / sizeof *offsets); i++) {
    check_all_dtypes((shape){1, 2, 1, 140, 120, 5, 1, offsets[i]}, CONTIGUOUS);
    check_all_dtypes((shape){1, 1, 1, 1, 120, 17, 1, offsets[i]}, CONTIGUOUS);
  }
  for (int causal = 0; causal < 2; causal++)
    check_all_dtypes((shape){2, 2, 1, 3, 0, 20, causal, 0}, CONTIGUOUS); /* Sk = 0 */
}

static void test_accuracy(void) {
  check_group("accuracy over long rows");
  static const int head_dims[] = {64, 128, 256};
  for (int i = 0; i < 3; i++) {
    problem p = problem_new((shape){1, 1, 1, 40, 4096, head_dims[i], 0, 0}, DHP_FLOAT32, CONTIGUOUS);
    for (int k = 0; k < test_kernel_count; k++) {
      run_kernel(&test_kernels[k], &p);
      const comparison result = compare(&p);
      check(result.relative <= 1e-6, "%s, D=%d: %.2e", test_kernels[k].instructions, head_dims[i], result.relative);
    }
    problem_free(&p);
  }
}

static void test_scales(void) {
  check_group("scales and missing lse");
  static const float scales[] = {0.f, 1e-30f, 0.01f, 3.f, 30.f};
  for (int i = 0; i < 5; i++) {
    problem p = problem_new((shape){1, 2, 1, 9, 150, 24, 1, 100}, DHP_FLOAT32, CONTIGUOUS);
    p.args.scale = scales[i];
    for (int k = 0; k < test_kernel_count; k++) {
      run_kernel(&test_kernels[k], &p);
      /* An error of the exponent is an error of p: scores of some 30 * 20 have an ulp of 6e-5. */
      const comparison result = compare(&p);
      check(result.conditioned <= 1e-6 * fmax(1.0, 10.0 * (double)scales[i]) && result.lse <= 2e-6,
            "%s, scale %g: %.2e, lse %.2e", test_kernels[k].instructions, (double)scales[i], result.conditioned,
            result.lse);
      const double with_lse = get(&p.args.out, 0, 1, 8, 23);
      problem_poison(&p);
      p.args.lse = NULL;
      run_kernel(&test_kernels[k], &p);
      const double without_lse = get(&p.args.out, 0, 1, 8, 23);
      check(without_lse == with_lse, "%s, scale %g: %g with lse, %g without", test_kernels[k].instructions,
            (double)scales[i], with_lse, without_lse);
      p.args.lse = p.lse;
    }
    problem_free(&p);
  }
}

/* One key: out is v, whatever its bits. Runs every 16-bit number through the vector forms of the conversions. */
static void test_identity(void) {
  check_group("one key returns its value, for all 16-bit values");
  for (int t = 1; t < 3; t++) {
    problem p = problem_new((shape){256, 1, 1, 1, 1, 256, 0, 0}, dtypes[t], CONTIGUOUS);
    for (uint32_t bits = 0; bits < 0x10000u; bits++)
      ((uint16_t *)p.args.v.data)[bits] = (uint16_t)bits;
    for (int k = 0; k < test_kernel_count; k++) {
      run_kernel(&test_kernels[k], &p);
      for (uint32_t bits = 0; bits < 0x10000u; bits++) {
        const double v = value_of(dtypes[t], bits),
                     flushed = fabs(v) < 0x1p-126 ? 0.0 : v; /* float32's smallest normal */
        const uint32_t got = ((const uint16_t *)p.args.out.data)[bits];
        check(isnan(v) ? got == nearest_bits(dtypes[t], v) : value_of(dtypes[t], got) == flushed,
              "%s, dtype %d: %04x became %04x", test_kernels[k].instructions, (int)dtypes[t], bits, got);
      }
    }
    problem_free(&p);
  }
}

void test_attention(void) {
  test_shapes();
  test_causal_offsets();
  test_accuracy();
  test_scales();
  test_identity();
}
