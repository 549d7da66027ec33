/*
 * convert.h - float16 and bfloat16 to float32 and back, on the types of ct.h (one value, or a vector of lanes).
 *
 * A 16-bit number travels in the low half of a 32-bit lane. Integer arithmetic and selects alone, so that subnormals,
 * infinities and NaNs cost what every number costs. Narrowing rounds to nearest even; NaN becomes one canonical NaN.
 */
#ifndef DHP_CONVERT_H
#define DHP_CONVERT_H

#include "../ct.h"

/* Bits are below 2^31 here, where the signed comparison (the only one SSE and AVX2 have) equals the unsigned one. */
DHP_CT dhp_ct_u32 dhp_bits_below(dhp_ct_u32 bits, uint32_t limit) {
  return dhp_ct_less_i32((dhp_ct_i32)bits, (dhp_ct_i32)dhp_ct_splat_u32(limit));
}

/* Rounds away the low `shift` bits, ties to even. */
DHP_CT dhp_ct_u32 dhp_round_off(dhp_ct_u32 bits, int shift) {
  return (bits + ((1u << (shift - 1)) - 1u) + ((bits >> shift) & 1u)) >> shift;
}

/* ---- float16: 1 sign, 5 exponent, 10 mantissa bits; exponent bias 15 against float32's 127 --------------------------
 */

DHP_CT dhp_ct_f32 dhp_float16_to_float32(dhp_ct_u32 half) {
  const uint32_t rebias = (127u - 15u) << 23;
  const dhp_ct_u32 exponent = half & 0x7c00u;
  const dhp_ct_u32 moved = (half & 0x7fffu) << 13;
  const dhp_ct_u32 normal = moved + rebias;
  const dhp_ct_u32 special = normal + rebias; /* infinity and NaN: exponent 31 becomes 255 */
  /* Subnormal: 2^-14 (1 + m) - 2^-14, exact; 0x38800000 is 2^-14. */
  const dhp_ct_u32 small = dhp_ct_bits(dhp_ct_float(moved + 0x38800000u) - 0x1p-14f);

  const dhp_ct_u32 is_small = dhp_ct_equal_u32(exponent, dhp_ct_splat_u32(0));
  const dhp_ct_u32 is_special = dhp_ct_equal_u32(exponent, dhp_ct_splat_u32(0x7c00u));
  const dhp_ct_u32 magnitude = dhp_ct_select_u32(is_small, small, dhp_ct_select_u32(is_special, special, normal));
  return dhp_ct_float(magnitude | ((half & 0x8000u) << 16));
}

DHP_CT dhp_ct_u32 dhp_float32_to_float16(dhp_ct_f32 x) {
  const uint32_t rebias = (127u - 15u) << 23;
  const dhp_ct_u32 sign = dhp_ct_bits(x) & 0x80000000u;
  const dhp_ct_u32 magnitude = dhp_ct_bits(x) ^ sign;
  const dhp_ct_u32 normal = dhp_round_off(magnitude - rebias, 13); /* may carry into infinity, as it should */
  /* Below 2^-14: the ulp of 1/2 is 2^-24, float16's smallest step, so that adding 1/2 rounds; 0x3f000000 is 1/2. */
  const dhp_ct_u32 small = dhp_ct_bits(dhp_ct_float(magnitude) + 0.5f) - 0x3f000000u;

  const dhp_ct_u32 is_small = dhp_bits_below(magnitude, 0x38800000u);  /* < 2^-14 */
  const dhp_ct_u32 is_finite = dhp_bits_below(magnitude, 0x47800000u); /* < 2^16 */
  const dhp_ct_u32 is_number = dhp_bits_below(magnitude, 0x7f800001u); /* not NaN */
  dhp_ct_u32 half = dhp_ct_select_u32(is_small, small, normal);
  half = dhp_ct_select_u32(is_finite, half, dhp_ct_splat_u32(0x7c00u)) | (sign >> 16);
  return dhp_ct_select_u32(is_number, half, dhp_ct_splat_u32(0x7e00u));
}

/* ---- bfloat16: the upper half of a float32 ------------------------------------------------------------------------
 */

DHP_CT dhp_ct_f32 dhp_bfloat16_to_float32(dhp_ct_u32 brain) { return dhp_ct_float(brain << 16); }

DHP_CT dhp_ct_u32 dhp_float32_to_bfloat16(dhp_ct_f32 x) {
  const dhp_ct_u32 is_nan = dhp_ct_is_nan(x);
  return dhp_ct_select_u32(is_nan, dhp_ct_splat_u32(0x7fc0u), dhp_round_off(dhp_ct_bits(x), 16));
}

#endif
