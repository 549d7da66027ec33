/* tanh.h - the hyperbolic tangent, as ct.h has the other functions. */
#ifndef DHP_CPU_TANH_H
#define DHP_CPU_TANH_H

#include "../ct.h"

/*
 * tanh within 2 ulp: up to 5/8 an odd polynomial of least maximal relative error (4e-9), from there on
 * 1 - 2 / (e^(2|x|) + 1) with the sign of x, where the difference loses nothing. +-inf to +-1, NaN to NaN. CT:
 * straight-line.
 */
DHP_CT dhp_ct_f32 dhp_ct_tanh(dhp_ct_f32 x) {
  const dhp_ct_u32 sign = dhp_ct_bits(x) & dhp_ct_splat_u32(0x80000000u);
  const dhp_ct_f32 magnitude = dhp_ct_float(dhp_ct_bits(x) ^ sign), square = x * x;
  dhp_ct_f32 p = dhp_ct_splat(-0.0057049869f);
  p = dhp_ct_horner(p, square, 0.020639088f);
  p = dhp_ct_horner(p, square, -0.053739715f);
  p = dhp_ct_horner(p, square, 0.13331442f);
  p = dhp_ct_horner(p, square, -0.33333281f);
  const dhp_ct_f32 small = dhp_ct_fma(x * square, p, x);

  /* 2 log2(e); from 10 on the nearest float32 is 1 */
  const dhp_ct_f32 exponential = dhp_ct_exp2(dhp_ct_min(magnitude, dhp_ct_splat(10.f)) * dhp_ct_splat(2.88539008f));
  const dhp_ct_f32 one = dhp_ct_splat(1.f);
  const dhp_ct_f32 large = dhp_ct_fma(dhp_ct_splat(-2.f), dhp_ct_reciprocal(exponential + one), one);
  return dhp_ct_select(dhp_ct_less(magnitude, dhp_ct_splat(0.625f)), small, dhp_ct_float(dhp_ct_bits(large) ^ sign));
}

#endif
