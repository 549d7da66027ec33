/* test_numbers.c - the constant-time primitives and the conversions, in both floating-point states. */
#include <math.h>
#include <string.h>

#include "../../../csrc/cpu/convert.h"
#include "../../../csrc/cpu/float64/numbers.h"
#include "../../../csrc/cpu/float_mode.h"
#include "../../../csrc/cpu/tanh.h"
#include "../../../csrc/ct.h"
#include "check.h"
#include "reference.h"
#include "test_cpu.h"

enum { SAMPLES = 100000 };

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Error of x in units of the expected value's last place, of so many bits behind the point. */
static double ulps_of(double x, double expected, int bits) {
  return fabs(x - expected) / ldexp(1.0, ilogb(expected) - bits);
}
static double ulps(float x, double expected) { return ulps_of((double)x, expected, 23); }
static double ulps64(double x, double expected) { return ulps_of(x, expected, 52); }

static void test_bit_masks(void) {
  check_group("masks and selects");
  const uint32_t all = 0xffffffffu;
  check(dhp_ct_barrier(12345u) == 12345u, "barrier");
  check(dhp_ct_less(1.f, 2.f) == all && !dhp_ct_less(2.f, 1.f) && !dhp_ct_less(1.f, 1.f), "less");
  check(!dhp_ct_less(NAN, 1.f) && !dhp_ct_less(1.f, NAN), "less with NaN");
  check(dhp_ct_less_i32(-1, 0) == all && !dhp_ct_less_i32(0, 0) && !dhp_ct_less_i32(1, 0), "less_i32");
  check(dhp_ct_equal_u32(7, 7) == all && !dhp_ct_equal_u32(7, 8), "equal_u32");
  check(dhp_ct_is_nan(NAN) == all && !dhp_ct_is_nan(INFINITY) && !dhp_ct_is_nan(0.f), "is_nan");
  check(dhp_ct_select_u32(all, 1, 2) == 1 && dhp_ct_select_u32(0, 1, 2) == 2, "select_u32");
  check(dhp_ct_select(all, 1.f, NAN) == 1.f && dhp_ct_select(0, NAN, 2.f) == 2.f, "select");
  check(dhp_ct_max(1.f, 2.f) == 2.f && dhp_ct_max(2.f, 1.f) == 2.f, "max");
  check(dhp_ct_max(-INFINITY, -1.f) == -1.f && dhp_ct_max(3.f, INFINITY) == INFINITY, "max with infinity");
  check(dhp_ct_max(1.f, NAN) == 1.f && isnan(dhp_ct_max(NAN, 1.f)), "max with NaN");
  check(bits_of(dhp_ct_canonical(float_of(0xffc12345u))) == 0x7fc00000u, "canonical NaN");
  check(dhp_ct_canonical(-1.5f) == -1.5f && dhp_ct_canonical(-INFINITY) == -INFINITY, "canonical of a number");
}

static void test_functions(void) {
  check_group("exp2, log and reciprocal, in ulps");
  double worst_exp = 0.0, worst_log = 0.0, worst_reciprocal = 0.0;
  for (int i = 0; i < SAMPLES; i++) {
    const float x = (float)(-126.0 + 253.4 * i / SAMPLES), near_zero = (float)(-20.0 * i / SAMPLES);
    worst_exp = fmax(worst_exp, ulps(dhp_ct_exp2(x), exp2((double)x)));
    worst_exp = fmax(worst_exp, ulps(dhp_ct_exp2(near_zero), exp2((double)near_zero)));
    const float positive = float_of((uint32_t)(0x00800000u + random_bits() % 0x7f000000u)); /* any normal number */
    const float near_one = (float)(0.5 + 1.5 * i / SAMPLES);
    if (positive != 1.f) worst_log = fmax(worst_log, ulps(dhp_ct_log(positive), log((double)positive)));
    if (near_one != 1.f) worst_log = fmax(worst_log, ulps(dhp_ct_log(near_one), log((double)near_one)));
    if (positive < 0x1p126f)
      worst_reciprocal = fmax(worst_reciprocal, ulps(dhp_ct_reciprocal(positive), 1.0 / (double)positive));
  }
  check(worst_exp <= 1.2, "exp2: %.3f ulp", worst_exp);
  check(worst_log <= 1.5, "log: %.3f ulp", worst_log);
  check(worst_reciprocal <= 1.5, "reciprocal: %.3f ulp", worst_reciprocal);

  check(dhp_ct_exp2(0.f) == 1.f && dhp_ct_exp2(-0.f) == 1.f && dhp_ct_exp2(-126.f) == 0x1p-126f, "exact powers");
  check(dhp_ct_exp2(-INFINITY) == 0.f && dhp_ct_exp2(-0x1.fffffep127f) == 0.f && dhp_ct_exp2(-127.f) == 0.f,
        "exp2 to 0");
  check(!signbit(dhp_ct_exp2(-INFINITY)), "exp2 to +0");
  check(dhp_ct_exp2(INFINITY) == INFINITY && dhp_ct_exp2(128.f) == INFINITY, "exp2 to inf");
  check(dhp_ct_log(1.f) == 0.f && dhp_ct_log(0.f) == -INFINITY && dhp_ct_log(INFINITY) == INFINITY, "log");
  check(dhp_ct_reciprocal(0.f) == INFINITY && dhp_ct_reciprocal(INFINITY) == 0.f, "reciprocal");
  check(dhp_ct_reciprocal(1.f) == 1.f && dhp_ct_reciprocal(0.25f) == 4.f, "reciprocal of powers");
  int lost = 0;
  for (uint32_t payload = 1; payload < 0x00800000u;
       payload = payload * 3 + 1) /* NaNs of either sign and many payloads */
    for (uint32_t sign = 0; sign < 2; sign++) {
      const float nan = float_of(sign << 31 | 0x7f800000u | payload);
      lost += !isnan(dhp_ct_exp2(nan)) + !isnan(dhp_ct_log(nan)) + !isnan(dhp_ct_reciprocal(nan));
    }
  check(lost == 0, "%d NaNs lost", lost);
}

static void test_tangent(void) {
  check_group("tanh");
  double worst = 0.0, worst64 = 0.0, farthest64 = 0.0;
  for (int i = 1; i < SAMPLES; i++) {
    const float x = (float)(12.0 * i / SAMPLES), any = float_of((uint32_t)(0x00800000u + random_bits() % 0x3f800000u));
    worst = fmax(worst, fmax(ulps(dhp_ct_tanh(x), tanh((double)x)), ulps(dhp_ct_tanh(-x), tanh(-(double)x))));
    worst = fmax(worst, ulps(dhp_ct_tanh(any), tanh((double)any)));
    const double wide = 24.0 * i / SAMPLES;
    farthest64 =
        fmax(farthest64, fmax(fabs(dhp_ct64_tanh(wide) - tanh(wide)), fabs(dhp_ct64_tanh(-wide) + tanh(wide))));
    const double tiny = ldexp(wide, -(int)(random_bits() % 900u));
    worst64 = fmax(worst64, fmax(ulps64(dhp_ct64_tanh(wide), tanh(wide)), ulps64(dhp_ct64_tanh(-wide), tanh(-wide))));
    worst64 = fmax(worst64, ulps64(dhp_ct64_tanh(tiny), tanh(tiny)));
  }
  check(worst <= 2., "tanh: %.3f ulp", worst);
  check(worst64 <= 4., "tanh of float64: %.3f ulp", worst64);
  check(farthest64 <= 0x1p-51, "tanh of float64: %.3g", farthest64);
  check(dhp_ct_tanh(0.f) == 0.f && dhp_ct_tanh(INFINITY) == 1.f && dhp_ct_tanh(-INFINITY) == -1.f, "tanh at the ends");
  check(dhp_ct64_tanh(0.) == 0. && dhp_ct64_tanh(INFINITY) == 1. && dhp_ct64_tanh(-INFINITY) == -1., "the same");
  check(isnan(dhp_ct_tanh(NAN)) && isnan(dhp_ct_tanh(-NAN)) && isnan(dhp_ct64_tanh(NAN)), "tanh of NaN");
}

static void test_widening(dhp_dtype dtype, dhp_ct_f32 (*widen)(dhp_ct_u32)) {
  for (uint32_t bits = 0; bits < 0x10000u; bits++) {
    const double expected = value_of(dtype, bits);
    const uint32_t got = bits_of(widen(bits));
    check(isnan(expected) ? isnan(float_of(got)) : got == nearest_bits(DHP_FLOAT32, expected),
          "dtype %d, bits %04x: %08x", (int)dtype, bits, got);
  }
}

static dhp_ct_f32 widen_float16(dhp_ct_u32 bits) { return dhp_float16_to_float32(bits); }
static dhp_ct_f32 widen_bfloat16(dhp_ct_u32 bits) { return dhp_bfloat16_to_float32(bits); }

/* Both dtypes from one float; `what` tells the sweep it belongs to. */
static void test_narrowing(const char *what, uint32_t bits) {
  const uint32_t half = dhp_float32_to_float16(float_of(bits)), brain = dhp_float32_to_bfloat16(float_of(bits));
  const double value = value_of(DHP_FLOAT32, bits);
  check(half == nearest_bits(DHP_FLOAT16, value), "%s, float %08x: float16 %04x", what, bits, half);
  check(brain == nearest_bits(DHP_BFLOAT16, value), "%s, float %08x: bfloat16 %04x", what, bits, brain);
}

static void test_conversions(void) {
  test_widening(DHP_FLOAT16, widen_float16);
  test_widening(DHP_BFLOAT16, widen_bfloat16);
  static const uint32_t lows[] = {0, 1, 0x0fff, 0x1000, 0x3000, 0x7fff, 0x8000, 0x8001}; /* at and beside the ties */
  for (uint32_t high = 0; high < 0x10000u; high++)
    for (int i = 0; i < 8; i++)
      test_narrowing("tie", high << 16 | lows[i]);
  for (int i = 0; i < SAMPLES; i++)
    test_narrowing("random", (uint32_t)random_bits());
}

void test_numbers(void) {
  test_bit_masks();
  test_functions();
  test_tangent();
  check_group("float16 and bfloat16 conversions");
  test_conversions();
  check_group("the same with subnormals flushed to zero");
  const dhp_float_mode mode = dhp_float_mode_enter();
  test_conversions();
  dhp_float_mode_leave(mode);
}
