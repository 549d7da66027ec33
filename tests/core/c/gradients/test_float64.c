/* test_float64.c - the float64 numbers, and attention in float64, against the definition. */
#include <math.h>
#include <string.h>

#include "../../../../csrc/cpu/float64/float64.h"
#include "../../../../csrc/cpu/float64/numbers.h"
#include "../../../../csrc/cpu/float_mode.h"
#include "../check.h"
#include "../test_cpu.h"

enum { SAMPLES = 100000 };

/* Error of x in units of the expected value's last place. */
static double ulps(double x, long double expected) {
  return (double)(fabsl((long double)x - expected) / ldexpl(1.0L, ilogbl(expected) - 52));
}

static void test_functions(void) {
  double worst_exp = 0.0, worst_log = 0.0, worst_reciprocal = 0.0;
  for (int i = 0; i < SAMPLES; i++) {
    const double x = -708.0 + 1417.0 * i / SAMPLES, near_zero = -30.0 * i / SAMPLES;
    worst_exp = fmax(worst_exp, ulps(dhp_ct64_exp(x), expl((long double)x)));
    worst_exp = fmax(worst_exp, ulps(dhp_ct64_exp(near_zero), expl((long double)near_zero)));
    const double positive = dhp_ct64_double(0x0010000000000000u + random_bits() % 0x7fe0000000000000u); /* any normal */
    const double near_one = 0.5 + 1.5 * i / SAMPLES;
    if (positive != 1.0) worst_log = fmax(worst_log, ulps(dhp_ct64_log(positive), logl((long double)positive)));
    if (near_one != 1.0) worst_log = fmax(worst_log, ulps(dhp_ct64_log(near_one), logl((long double)near_one)));
    if (positive < 0x1p1022)
      worst_reciprocal = fmax(worst_reciprocal, ulps(dhp_ct64_reciprocal(positive), 1.0L / (long double)positive));
  }
  check(worst_exp <= 2.0, "exp: %.3f ulp", worst_exp);
  check(worst_log <= 3.0, "log: %.3f ulp", worst_log);
  check(worst_reciprocal <= 2.0, "reciprocal: %.3f ulp", worst_reciprocal);

  check(dhp_ct64_exp(0.0) == 1.0 && dhp_ct64_exp(-0.0) == 1.0, "exp of 0");
  check(dhp_ct64_exp(-INFINITY) == 0.0 && dhp_ct64_exp(-1e308) == 0.0 && dhp_ct64_exp(-709.0) == 0.0, "exp to 0");
  check(!signbit(dhp_ct64_exp(-INFINITY)), "exp to +0");
  check(dhp_ct64_exp(INFINITY) == INFINITY && dhp_ct64_exp(710.0) == INFINITY, "exp to inf");
  check(dhp_ct64_log(1.0) == 0.0 && dhp_ct64_log(0.0) == -INFINITY && dhp_ct64_log(INFINITY) == INFINITY, "log");
  check(dhp_ct64_reciprocal(0.0) == INFINITY && dhp_ct64_reciprocal(INFINITY) == 0.0, "reciprocal");
  check(dhp_ct64_reciprocal(1.0) == 1.0 && dhp_ct64_reciprocal(0.25) == 4.0, "reciprocal of powers");
  int lost = 0, odd = 0;
  for (uint64_t payload = 1; payload < 1ull << 52; payload = payload * 3 + 1)
    for (uint64_t sign = 0; sign < 2; sign++) {
      const double nan = dhp_ct64_double(sign << 63 | 0x7ff0000000000000u | payload);
      lost += !isnan(dhp_ct64_exp(nan)) + !isnan(dhp_ct64_log(nan)) + !isnan(dhp_ct64_reciprocal(nan));
      odd += dhp_ct64_bits(dhp_ct64_canonical(nan)) != 0x7ff8000000000000u;
    }
  check(lost == 0 && odd == 0, "%d NaNs lost, %d not canonical", lost, odd);
  check(dhp_ct64_canonical(-1.5) == -1.5 && dhp_ct64_canonical(-INFINITY) == -INFINITY, "canonical of a number");
  check(dhp_ct64_max(1.0, 2.0) == 2.0 && dhp_ct64_max(2.0, 1.0) == 2.0 && dhp_ct64_max(1.0, NAN) == 1.0, "max");
  check(dhp_ct64_is_finite(-1e308) == ~(uint64_t)0 && !dhp_ct64_is_finite(-INFINITY) && !dhp_ct64_is_finite(NAN),
        "is_finite");
}

static void test_forward(void) {
  check_group("float64: out and lse");
  static const int64_t offsets[] = {0, 7, -7, 119, -139, -140};
  for (int layout = CONTIGUOUS; layout <= EXPANDED; layout++)
    for (int i = 0; i < 6; i++)
      for (int causal = 0; causal < 2; causal++) {
        const shape s = {2, 4, 2, 1 + random_below(30), random_below(60), 1 + random_below(40), causal, offsets[i]};
        problem p = problem_new(s, DHP_FLOAT64, (memory_layout)layout);
        if (i == 5 && s.keys > 0) set(&p.args.k, 0, 0, 0, 0, NAN);
        if (i == 4) set(&p.args.q, 0, 0, 0, 0, INFINITY);
        dhp_float64_forward(&p.args, &p.mask, &p.places, NULL);
        const comparison result = compare(&p);
        check(result.conditioned <= 1e-14 && result.lse <= 1e-14 && result.mismatches == 0 &&
                  problem_gaps_touched(&p) == 0,
              "layout %d, Sq=%d Sk=%d D=%d, causal %d, %d: error %.2e, lse %.2e, %d mismatches", layout, (int)s.queries,
              (int)s.keys, (int)s.head_dim, causal, (int)offsets[i], result.conditioned, result.lse, result.mismatches);
        problem_free(&p);
      }
}

void test_float64(void) {
  check_group("float64: exp, log and reciprocal, in ulps");
  test_functions();
  const dhp_float_mode mode = dhp_float_mode_enter();
  test_functions();
  dhp_float_mode_leave(mode);
  test_forward();
}
