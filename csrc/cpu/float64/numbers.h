/*
 * numbers.h - ct.h for one float64: masks, selects, exp, log, 1 / x and tanh as straight-line code.
 *
 * The same rules: no branch, no libm, no division; a mask goes through a value barrier. Products and sums are rounded
 * one by one.
 */
#ifndef DHP_FLOAT64_NUMBERS_H
#define DHP_FLOAT64_NUMBERS_H

#include "../../ct.h"

DHP_CT uint64_t dhp_ct64_bits(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

DHP_CT double dhp_ct64_double(uint64_t x) {
  double value;
  __builtin_memcpy(&value, &x, sizeof value);
  return value;
}

/* All ones or zero, from a comparison's 1 or 0; the compiler cannot see that there are only two. */
DHP_CT uint64_t dhp_ct64_mask(int comparison) {
  uint64_t mask = (uint64_t)0 - (uint64_t)comparison;
  __asm__("" : "+r"(mask));
  return mask;
}

/* a where the mask is all ones, b where it is zero. */
DHP_CT double dhp_ct64_select(uint64_t mask, double a, double b) {
  return dhp_ct64_double((mask & dhp_ct64_bits(a)) | (~mask & dhp_ct64_bits(b)));
}

/* The larger one; a NaN in b is passed over, as dhp_ct_max does. */
DHP_CT double dhp_ct64_max(double a, double b) { return dhp_ct64_select(dhp_ct64_mask(a < b), b, a); }

/* Neither infinite nor NaN. */
DHP_CT uint64_t dhp_ct64_is_finite(double x) {
  const uint64_t infinity = 0x7ff0000000000000u;
  return dhp_ct64_mask((dhp_ct64_bits(x) & infinity) != infinity);
}

/* x, but every NaN has the same bits. */
DHP_CT double dhp_ct64_canonical(double x) {
  return dhp_ct64_select(dhp_ct64_mask(x != x), dhp_ct64_double(0x7ff8000000000000u), x);
}

/* log(2) in two parts; the high one has 32 bits, so that its product with an exponent is exact. */
static const double DHP_LN2_HIGH = 0x1.62e42feep-1, DHP_LN2_LOW = 0x1.a39ef35793c76p-33;

/*
 * e^x within 2 ulp: x = n log(2) + r with |r| <= log(2) / 2, e^r by its Taylor polynomial of degree 13 (error 4e-18).
 * Below -708.7 (float64's subnormals, and less) 0, above 709.4 +inf, NaN to NaN.
 */
DHP_CT double dhp_ct64_exp(double x) {
  /* -1023 log(2) and 1024 log(2): where the exponent field of 2^n is 0 and 2047, the zero and the infinity. */
  const double lowest = -709.08956571282410, highest = 709.78271289338400;
  x = dhp_ct64_select(dhp_ct64_mask(x < lowest), lowest, x);
  x = dhp_ct64_select(dhp_ct64_mask(highest < x), highest, x);

  /* At 1.5 * 2^52 the ulp is 1: the sum's low bits are n, here with float64's exponent bias of 1023 added. */
  const double to_integer = 0x1.8p52 + 1023.0, log2_e = 1.4426950408889634;
  const double shifted = x * log2_e + to_integer;
  const double power = dhp_ct64_double(dhp_ct64_bits(shifted) << 52); /* 2^n; 52 mantissa bits */
  const double n = shifted - to_integer;
  const double r = (x - n * DHP_LN2_HIGH) - n * DHP_LN2_LOW;

  static const double inverse_factorials[] = {1.0 / 6227020800.0,
                                              1.0 / 479001600.0,
                                              1.0 / 39916800.0,
                                              1.0 / 3628800.0,
                                              1.0 / 362880.0,
                                              1.0 / 40320.0,
                                              1.0 / 5040.0,
                                              1.0 / 720.0,
                                              1.0 / 120.0,
                                              1.0 / 24.0,
                                              1.0 / 6.0,
                                              0.5,
                                              1.0,
                                              1.0}; /* of 13, 12, ... 0 */
  double p = inverse_factorials[0];
  for (int i = 1; i < 14; i++)
    p = p * r + inverse_factorials[i];
  return p * power;
}

/* 1 / x within 2 ulp for x >= 0 whose reciprocal is a normal number; as dhp_ct_reciprocal, one iteration more. */
DHP_CT double dhp_ct64_reciprocal(double x) {
  const uint64_t bits = dhp_ct64_bits(x), infinity = 0x7ff0000000000000u;
  const uint64_t exponent = bits & infinity;
  const double m = dhp_ct64_double((bits & ~(infinity | 1ull << 63)) | 0x3ff0000000000000u); /* in [1, 2) */
  double y = 24.0 / 17.0 - 8.0 / 17.0 * m; /* the best line: error 1/17 */
  for (int i = 0; i < 4; i++)              /* the relative error squares: 3e-3, 1e-5, 1e-10, 2e-20 */
    y = y + y * (1.0 - m * y);
  y = y * dhp_ct64_double(0x7fe0000000000000u - exponent); /* 2^-e */
  y = dhp_ct64_select(dhp_ct64_mask(exponent == 0), __builtin_inf(), y);
  y = dhp_ct64_select(dhp_ct64_mask(bits == infinity), 0.0, y);
  return dhp_ct64_select(dhp_ct64_mask(x != x), x, y);
}

/*
 * Natural logarithm within 3 ulp, for x >= 0: x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)], and log(1 + f) =
 * 2 artanh(s), s = f / (2 + f), by its series up to s^23 (error 1e-18). 0 (and a subnormal) to -inf, +inf to +inf, NaN
 * to NaN.
 */
DHP_CT double dhp_ct64_log(double x) {
  const uint64_t bits = dhp_ct64_bits(x), infinity = 0x7ff0000000000000u;
  const uint64_t sqrt_half = 0x3fe6a09e667f3bcdu;      /* the float64 nearest to sqrt(1/2) */
  const int64_t e = (int64_t)(bits - sqrt_half) >> 52; /* 52: mantissa bits */
  const double f = dhp_ct64_double(bits - ((uint64_t)e << 52)) - 1.0;
  const double to_float = 0x1.8p52; /* ulp 1: e in its low bits is e as a float64 */
  const double exponent = dhp_ct64_double(dhp_ct64_bits(to_float) + (uint64_t)e) - to_float;

  const double s = f * dhp_ct64_reciprocal(2.0 + f), z = s * s;
  static const double odd[] = {1.0 / 23.0, 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0,
                               1.0 / 11.0, 1.0 / 9.0,  1.0 / 7.0,  1.0 / 5.0,  1.0 / 3.0};
  double p = odd[0];
  for (int i = 1; i < 11; i++)
    p = p * z + odd[i];
  const double y = exponent * DHP_LN2_HIGH + (2.0 * s + (2.0 * s * z * p + exponent * DHP_LN2_LOW));

  const uint64_t field = bits & infinity;
  const double special = dhp_ct64_select(dhp_ct64_mask(field == infinity), x, y); /* +inf or NaN: x itself */
  return dhp_ct64_select(dhp_ct64_mask(field == 0), -__builtin_inf(), special);
}

/*
 * tanh within 4 ulp and 2^-51: up to 1/2 as y / (y + 2) with y = e^(2|x|) - 1, by its Taylor polynomial of degree 18
 * (error 8e-18 of y), from there on 1 - 2 / (e^(2|x|) + 1) with the sign of x, where the difference loses nothing.
 * +-inf to +-1, NaN to NaN.
 */
DHP_CT double dhp_ct64_tanh(double x) {
  const uint64_t sign = dhp_ct64_bits(x) & 1ull << 63;
  const double magnitude = dhp_ct64_double(dhp_ct64_bits(x) ^ sign), is_one = 20.0; /* from 19.1 on, rounded */
  const uint64_t is_small = dhp_ct64_mask(magnitude < 0.5);
  const double least = dhp_ct64_select(dhp_ct64_mask(is_one < magnitude), is_one, magnitude);
  const double large = 1.0 - 2.0 * dhp_ct64_reciprocal(dhp_ct64_exp(2.0 * least) + 1.0);

  const double twice = 2.0 * dhp_ct64_select(is_small, magnitude, 0.5);
  static const double inverses[] = {1.0 / 19.0, 1.0 / 18.0, 1.0 / 17.0, 1.0 / 16.0, 1.0 / 15.0, 1.0 / 14.0,
                                    1.0 / 13.0, 1.0 / 12.0, 1.0 / 11.0, 1.0 / 10.0, 1.0 / 9.0,  1.0 / 8.0,
                                    1.0 / 7.0,  1.0 / 6.0,  1.0 / 5.0,  1.0 / 4.0,  1.0 / 3.0,  1.0 / 2.0};
  double p = 1.0; /* (e^r - 1) / r = 1 + r / 2 (1 + r / 3 (1 + ...)) */
  for (int i = 0; i < 18; i++)
    p = 1.0 + p * (twice * inverses[i]);
  const double y = twice * p, small = y * dhp_ct64_reciprocal(y + 2.0);
  return dhp_ct64_double(dhp_ct64_bits(dhp_ct64_select(is_small, small, large)) ^ sign);
}

#endif
