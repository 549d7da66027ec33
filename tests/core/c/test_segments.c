/* test_segments.c - rows that see several key segments: values, NaN and infinity, and the bits of keys split by them.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../../csrc/cpu/split.h"
#include "check.h"
#include "reference.h"
#include "test_cpu.h"

enum { SEGMENT = DHP_SEGMENT_KEYS, MOST_SEGMENTS = 3 };

static void test_ranges(void) {
  check_group("segments of ranges of keys");
  static const int64_t edges[] = {0,           1,           SEGMENT - 1,     SEGMENT,         SEGMENT + 1,
                                  2 * SEGMENT, 3 * SEGMENT, 3 * SEGMENT + 1, 5 * SEGMENT - 1, (int64_t)1 << 60};
  enum { EDGES = sizeof edges / sizeof *edges };
  for (int i = 0; i < EDGES; i++)
    for (int j = i; j < EDGES; j++) {
      const dhp_key_range keys = {edges[i], edges[j]};
      const dhp_segments segments = dhp_segments_of(keys);
      const dhp_key_range first = dhp_segment_part(keys, segments.first);
      const dhp_key_range last = dhp_segment_part(keys, segments.last - 1);
      const dhp_key_range behind = dhp_segment_part(keys, segments.last);
      check(segments.first < segments.last && first.first == keys.first && last.last == keys.last &&
                behind.first == behind.last && (i == j || (first.first < first.last && last.first < last.last)) &&
                first.last <= (segments.first + 1) * SEGMENT && last.first >= (segments.last - 1) * SEGMENT,
            "keys [%lld, %lld): segments [%lld, %lld)", (long long)keys.first, (long long)keys.last,
            (long long)segments.first, (long long)segments.last);
    }
}

/* ---- split, and not ------------------------------------------------------------------------------------------- */

static dhp_cpu_scratch scratch;

/* All units, each at once; or each of its segments for itself, the last one first, and then their fold. */
static void run_units(const dhp_cpu_kernel *kernel, const problem *p, int is_split) {
  dhp_cpu_partial partials[MOST_SEGMENTS];
  for (int64_t unit = 0; unit < dhp_cpu_units(&p->args); unit++) {
    const dhp_cpu_rows rows = dhp_cpu_unit(&p->args, &p->mask, &p->places, unit);
    memset(&scratch, 0xff, sizeof scratch); /* NaN wherever something is read before it is written */
    memset(partials, 0xff, sizeof partials);
    if (!is_split) {
      kernel->attend(&rows, &scratch);
      continue;
    }
    const dhp_segments segments = dhp_cpu_segments(&rows);
    if (segments.last - segments.first > MOST_SEGMENTS) abort();
    for (int64_t segment = segments.last; segment-- > segments.first;) {
      kernel->attend_segment(&rows, segment, &partials[segment - segments.first], &scratch);
      memset(&scratch, 0xff, sizeof scratch);
    }
    kernel->fold_segments(&rows, partials, &scratch);
  }
}

static void check_split(shape s, dhp_dtype dtype, int64_t lowest, int64_t highest) {
  problem p = problem_new(s, dtype, TRANSPOSED);
  p.mask = dhp_mask_band(s.queries, s.keys, lowest, highest);
  unsigned char *const whole = malloc(p.out.size + p.lse_size);
  if (!whole) abort();
  for (int k = 0; k < test_kernel_count; k++) {
    problem_poison(&p);
    run_units(&test_kernels[k], &p, 0);
    memcpy(whole, p.out.data, p.out.size);
    memcpy(whole + p.out.size, p.lse, p.lse_size);
    for (int way = 0; way < 2; way++) { /* always split; split where a call does it */
      problem_poison(&p);
      if (way == 0)
        run_units(&test_kernels[k], &p, 1);
      else
        run_kernel(&test_kernels[k], &p);
      check(memcmp(whole, p.out.data, p.out.size) == 0 && memcmp(whole + p.out.size, p.lse, p.lse_size) == 0,
            "%s, dtype %d, Hq=%d Sq=%d Sk=%d D=%d, %lld to %lld, way %d: other bits", test_kernels[k].instructions,
            (int)dtype, (int)s.heads, (int)s.queries, (int)s.keys, (int)s.head_dim, (long long)lowest,
            (long long)highest, way);
    }
  }
  free(whole);
  problem_free(&p);
}

static void test_split(void) {
  check_group("few rows have the same bits, their keys split or not");
  static const int lengths[] = {1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 33};
  for (int i = 0; i < 6; i++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++) {
      const int queries = 1 + random_below(DHP_CPU_FEW_ROWS), keys = lengths[i], head_dim = 1 + random_below(40);
      check_split((shape){2, 6, 2, queries, keys, head_dim, 0, 0}, (dhp_dtype)dtype, INT64_MIN, INT64_MAX);
      check_split((shape){1, 3, 1, 4, keys, head_dim, 0, 0}, (dhp_dtype)dtype, INT64_MIN, SEGMENT - 2);
      check_split((shape){1, 3, 1, 4, keys, head_dim, 0, 0}, (dhp_dtype)dtype, SEGMENT - 6, SEGMENT - 2);
      check_split((shape){1, 4, 1, 1, keys, head_dim, 0, 0}, (dhp_dtype)dtype, 1000, SEGMENT + 1500);
    }
}

/* What is split does not depend on who computes: a piece for each segment of few rows, and a partial for each piece. */
static void test_pieces(void) {
  check_group("pieces of few rows");
  static const struct {
    int64_t heads, queries, keys, lowest, segments;
  } cases[] = {{8, 1, SEGMENT, INT64_MIN, 1},     {8, 1, SEGMENT + 1, INT64_MIN, 2},
               {8, 4, 5 * SEGMENT, INT64_MIN, 5}, {8, 5, 5 * SEGMENT, INT64_MIN, 1},
               {8, 0, 5 * SEGMENT, INT64_MIN, 1}, {2, 1, 2 * SEGMENT - 20, SEGMENT - 9, 1},
               {2, 1, 3 * SEGMENT, SEGMENT, 2}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const dhp_attention args = {.q.size = {3, cases[i].heads, cases[i].queries, 8},
                                .k.size = {3, 2, cases[i].keys, 8},
                                .v.size = {3, 2, cases[i].keys, 8}};
    const dhp_mask mask = dhp_mask_band(cases[i].queries, cases[i].keys, cases[i].lowest, INT64_MAX);
    const dhp_cpu_split split = dhp_cpu_split_of(&args, &mask);
    const int64_t units = dhp_cpu_units(&args), segments = cases[i].segments;
    check(split.pieces == units * segments && split.partials == (segments > 1 ? split.pieces : 0) &&
              split.folds == (segments > 1 ? units : 0),
          "case %zu: %lld units, %lld pieces, %lld partials, %lld folds", i, (long long)units, (long long)split.pieces,
          (long long)split.partials, (long long)split.folds);
  }
}

/* ---- values --------------------------------------------------------------------------------------------------- */

static void test_accuracy(void) {
  check_group("accuracy over several segments");
  static const int queries[] = {1, 6}, head_dims[] = {128, 24};
  for (int i = 0; i < 2; i++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++) {
      problem p = problem_new((shape){1, 1, 1, queries[i], 3 * SEGMENT - 100, head_dims[i], 0, 0}, (dhp_dtype)dtype,
                              CONTIGUOUS);
      for (int k = 0; k < test_kernel_count; k++) {
        run_kernel(&test_kernels[k], &p);
        const comparison result = compare(&p);
        check(result.conditioned <= tolerance((dhp_dtype)dtype) && result.lse <= 2e-6 && result.mismatches == 0 &&
                  (dtype != DHP_FLOAT32 || result.relative <= 1e-6),
              "%s, dtype %d, Sq=%d D=%d: %.2e, %.2e of the result, lse %.2e", test_kernels[k].instructions, dtype,
              queries[i], head_dims[i], result.conditioned, result.relative, result.lse);
      }
      problem_free(&p);
    }
}

/* Keys from `first` on get a score; D = 1 and queries of ones, so that a key is one. */
static void set_scores(problem *p, int64_t first, int64_t last, double score) {
  for (int64_t j = first; j < last; j++)
    set(&p->args.k, 0, 0, j, 0, score);
}

static void check_reference(const dhp_cpu_kernel *kernel, problem *p, const char *what) {
  problem_poison(p);
  run_kernel(kernel, p);
  const comparison result = compare(p);
  check(result.mismatches == 0 && result.conditioned <= tolerance(p->args.out.dtype) && result.lse <= 2e-6,
        "%s, dtype %d, Sq=%d, %s: %d mismatches, error %.2e, lse %.2e", kernel->instructions, (int)p->args.out.dtype,
        (int)p->args.q.size[2], what, result.mismatches, result.conditioned, result.lse);
}

/* Each special value in each of three segments, alone there or among numbers that are far away. */
static void test_nonfinite(void) {
  check_group("NaN, infinity and distant scores in one segment of three");
  static const double values[] = {NAN, INFINITY, -INFINITY, 600.0, -600.0};
  for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++)
    for (int k = 0; k < test_kernel_count; k++)
      for (int queries = 2; queries <= 6; queries += 4) {
        const int keys = 2 * SEGMENT + 300;
        problem p = problem_new((shape){1, 1, 1, queries, keys, 1, 0, 0}, (dhp_dtype)dtype, CONTIGUOUS);
        p.args.scale = 1.f;
        for (int i = 0; i < queries; i++)
          set(&p.args.q, 0, 0, i, 0, 1.0);
        for (int64_t segment = 0; segment < 3; segment++)
          for (int i = 0; i < 5; i++) {
            const dhp_key_range part = dhp_segment_part((dhp_key_range){0, keys}, segment);
            set_scores(&p, 0, keys, 0.0);
            set_scores(&p, part.first + 200, part.first + 201, values[i]);
            check_reference(&test_kernels[k], &p, "one score");
            set_scores(&p, part.first, part.last, values[i]);
            check_reference(&test_kernels[k], &p, "a whole segment");
            set_scores(&p, 0, keys, -600.0);
            set_scores(&p, part.first, part.last, values[i]);
            check_reference(&test_kernels[k], &p, "a whole segment, the rest far below");
            set_scores(&p, 0, keys, -INFINITY);
            set_scores(&p, part.first + 200, part.first + 201, values[i]);
            check_reference(&test_kernels[k], &p, "one score, the rest -inf");
            set_scores(&p, 0, keys, 0.0);
            set(&p.args.v, 0, 0, part.last - 1, 0, values[i]);
            check_reference(&test_kernels[k], &p, "a value");
            set_scores(&p, part.first, part.last, -INFINITY);
            check_reference(&test_kernels[k], &p, "a value where all scores are -inf");
            set(&p.args.v, 0, 0, part.last - 1, 0, 1.0);
          }
        problem_free(&p);
      }
}

void test_segments(void) {
  test_ranges();
  test_split();
  test_pieces();
  test_accuracy();
  test_nonfinite();
}
