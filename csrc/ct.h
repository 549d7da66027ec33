/*
 * ct.h - constant-time primitives, for C11 (GCC, Clang) and for CUDA device code.
 *
 * A secret chooses between values by a mask (all ones or zero), never by a branch or an address. Every function here
 * is straight-line code: the same instructions for every input, no libm call, no division (libm branches on values,
 * and dividers of older CPUs stop early).
 *
 * One definition serves one value and many: a file that defines DHP_CT_LANES (a power of two) before the include gets
 * GCC vectors of that many lanes in place of scalars. A lane of a vector cannot branch. A scalar mask could be turned
 * back into a branch by the compiler, so it goes through a value barrier.
 *
 * Where a product and a sum are rounded together, the source says so (dhp_ct_fma); the compiler, which would choose
 * anew in every loop, may not (-ffp-contract=off). Otherwise a row's bits would depend on the loop that computes it.
 *
 * Subnormal float32 numbers are slow on many CPUs, which is a leak that no instruction sequence avoids: the CPU kernel
 * runs with subnormals flushed to zero (cpu/float_mode.h), CUDA code uses the .ftz forms.
 */
#ifndef DHP_CT_H
#define DHP_CT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define DHP_CT static __device__ __forceinline__
#else
#define DHP_CT static inline __attribute__((always_inline, unused))
#endif

#if defined(DHP_CT_LANES)
typedef float dhp_ct_f32 __attribute__((vector_size(DHP_CT_LANES * 4)));
typedef uint32_t dhp_ct_u32 __attribute__((vector_size(DHP_CT_LANES * 4)));
typedef int32_t dhp_ct_i32 __attribute__((vector_size(DHP_CT_LANES * 4)));
#else
typedef float dhp_ct_f32;
typedef uint32_t dhp_ct_u32;
typedef int32_t dhp_ct_i32;
#endif

/* ---- bits ------------------------------------------------------------------------------------------------------ */

#if defined(__CUDACC__)
DHP_CT dhp_ct_u32 dhp_ct_bits(dhp_ct_f32 x) { return __float_as_uint(x); }
DHP_CT dhp_ct_f32 dhp_ct_float(dhp_ct_u32 x) { return __uint_as_float(x); }
#else
DHP_CT dhp_ct_u32 dhp_ct_bits(dhp_ct_f32 x) {
  dhp_ct_u32 bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
DHP_CT dhp_ct_f32 dhp_ct_float(dhp_ct_u32 x) {
  dhp_ct_f32 value;
  __builtin_memcpy(&value, &x, sizeof value);
  return value;
}
#endif

/* The same public constant in every lane. */
#if defined(DHP_CT_LANES)
DHP_CT dhp_ct_f32 dhp_ct_splat(float x) { return x - (dhp_ct_f32){0}; }
DHP_CT dhp_ct_u32 dhp_ct_splat_u32(uint32_t x) { return x + (dhp_ct_u32){0}; }
#else
DHP_CT dhp_ct_f32 dhp_ct_splat(float x) { return x; }
DHP_CT dhp_ct_u32 dhp_ct_splat_u32(uint32_t x) { return x; }
#endif

/* ---- masks ----------------------------------------------------------------------------------------------------- */

/* x, but the compiler knows nothing about it: it cannot see that a mask has only two values. */
DHP_CT uint32_t dhp_ct_barrier(uint32_t x) {
  __asm__("" : "+r"(x));
  return x;
}

/* A comparison of lanes is a mask already; one of scalars is 0 or 1. */
#if defined(DHP_CT_LANES)
#define DHP_CT_MASK(comparison) ((dhp_ct_u32)(comparison))
#else
#define DHP_CT_MASK(comparison) dhp_ct_barrier(0u - (uint32_t)(comparison))
#endif

DHP_CT dhp_ct_u32 dhp_ct_less(dhp_ct_f32 a, dhp_ct_f32 b) { return DHP_CT_MASK(a < b); } /* zero if one is NaN */
DHP_CT dhp_ct_u32 dhp_ct_less_i32(dhp_ct_i32 a, dhp_ct_i32 b) { return DHP_CT_MASK(a < b); }
DHP_CT dhp_ct_u32 dhp_ct_equal_u32(dhp_ct_u32 a, dhp_ct_u32 b) { return DHP_CT_MASK(a == b); }
DHP_CT dhp_ct_u32 dhp_ct_is_nan(dhp_ct_f32 x) { return DHP_CT_MASK(x != x); }

/* a where the mask is all ones, b where it is zero. */
DHP_CT dhp_ct_u32 dhp_ct_select_u32(dhp_ct_u32 mask, dhp_ct_u32 a, dhp_ct_u32 b) { return (mask & a) | (~mask & b); }
DHP_CT dhp_ct_f32 dhp_ct_select(dhp_ct_u32 mask, dhp_ct_f32 a, dhp_ct_f32 b) {
  return dhp_ct_float(dhp_ct_select_u32(mask, dhp_ct_bits(a), dhp_ct_bits(b)));
}

/* ---- float32 arithmetic ---------------------------------------------------------------------------------------- */

/*
 * The larger one. A NaN in b is passed over and a NaN in a stays: a running maximum a = max(a, x) never becomes NaN.
 * The row of a NaN score is NaN all the same, because exp2(NaN - maximum) enters its sum. The smaller one likewise.
 * DHP_CT_MAX(a, b) and DHP_CT_MIN(a, b) name instructions that give a where it is larger, or smaller, and else b: x86
 * has them.
 */
#if defined(DHP_CT_MAX)
DHP_CT dhp_ct_f32 dhp_ct_max(dhp_ct_f32 a, dhp_ct_f32 b) { return (dhp_ct_f32)DHP_CT_MAX(b, a); }
DHP_CT dhp_ct_f32 dhp_ct_min(dhp_ct_f32 a, dhp_ct_f32 b) { return (dhp_ct_f32)DHP_CT_MIN(b, a); }
#else
DHP_CT dhp_ct_f32 dhp_ct_max(dhp_ct_f32 a, dhp_ct_f32 b) { return dhp_ct_select(dhp_ct_less(a, b), b, a); }
DHP_CT dhp_ct_f32 dhp_ct_min(dhp_ct_f32 a, dhp_ct_f32 b) { return dhp_ct_select(dhp_ct_less(b, a), b, a); }
#endif

/* x, but every NaN has the same bits: sign and payload would tell which operand of which instruction was NaN. */
DHP_CT dhp_ct_f32 dhp_ct_canonical(dhp_ct_f32 x) {
  return dhp_ct_float(dhp_ct_select_u32(dhp_ct_is_nan(x), dhp_ct_splat_u32(0x7fc00000u), dhp_ct_bits(x)));
}

#if defined(__CUDACC__)

/* PTX ISA, ex2: within 2 ulp, -inf to 0, +inf to +inf, NaN to NaN. */
DHP_CT dhp_ct_f32 dhp_ct_exp2(dhp_ct_f32 x) {
  dhp_ct_f32 y;
  __asm__("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Logarithm in base 2; PTX ISA, lg2: 0 (and a subnormal) to -inf, +inf to +inf, NaN to NaN. */
DHP_CT dhp_ct_f32 dhp_ct_log2(dhp_ct_f32 x) {
  dhp_ct_f32 y;
  __asm__("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Natural logarithm, from that. */
DHP_CT dhp_ct_f32 dhp_ct_log(dhp_ct_f32 x) {
  const float ln2 = 0.69314718f;
  return dhp_ct_log2(x) * ln2;
}

/* PTX ISA, rcp: within 1 ulp, 0 to inf, inf to 0, NaN to NaN. */
DHP_CT dhp_ct_f32 dhp_ct_reciprocal(dhp_ct_f32 x) {
  dhp_ct_f32 y;
  __asm__("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else

/* a b + c; rounded once if DHP_CT_FMA(a, b, c) names the instruction that does that, else twice. */
DHP_CT dhp_ct_f32 dhp_ct_fma(dhp_ct_f32 a, dhp_ct_f32 b, dhp_ct_f32 c) {
#if defined(DHP_CT_FMA)
  return (dhp_ct_f32)DHP_CT_FMA(a, b, c);
#else
  return a * b + c;
#endif
}

/* p f + c: a step of Horner's scheme. */
DHP_CT dhp_ct_f32 dhp_ct_horner(dhp_ct_f32 p, dhp_ct_f32 f, float c) { return dhp_ct_fma(p, f, dhp_ct_splat(c)); }

/*
 * 2^x within 1.2 ulp: x = n + f with f in [-1/2, 1/2], 2^f = 1 + f P(f) by a polynomial of least maximal relative error
 * (2e-9). -inf and everything below -126.5 to 0, +inf and everything above 127.5 to +inf, NaN to NaN.
 */
DHP_CT dhp_ct_f32 dhp_ct_exp2(dhp_ct_f32 x) {
  /* Where the exponent field of 2^n is 0 and 255: the zero and the infinity of float32. */
  x = dhp_ct_min(dhp_ct_max(x, dhp_ct_splat(-127.f)), dhp_ct_splat(128.f));

  /* At 1.5 * 2^23 the ulp is 1: the sum's low bits are n, here with float32's exponent bias of 127 added. */
  const dhp_ct_f32 to_integer = dhp_ct_splat(0x1.8p23f + 127.f);
  const dhp_ct_f32 shifted = x + to_integer;
  const dhp_ct_f32 power = dhp_ct_float(dhp_ct_bits(shifted) << 23); /* 2^n; 23 mantissa bits */
  const dhp_ct_f32 f = x - (shifted - to_integer);

  dhp_ct_f32 p = dhp_ct_splat(0.00015353362f);
  p = dhp_ct_horner(p, f, 0.0013398874f);
  p = dhp_ct_horner(p, f, 0.009618437f);
  p = dhp_ct_horner(p, f, 0.055503324f);
  p = dhp_ct_horner(p, f, 0.24022648f);
  p = dhp_ct_horner(p, f, 0.6931472f);
  p = dhp_ct_horner(p, f, 1.f);
  return p * power;
}

/*
 * Natural logarithm within 1.5 ulp, for x >= 0: x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)],
 * log(1 + f) = f - f^2/2 + f^3 P(f) by a polynomial of least maximal relative error (6e-9). 0 (and a subnormal) to
 * -inf, +inf to +inf, NaN to NaN.
 */
DHP_CT dhp_ct_f32 dhp_ct_log(dhp_ct_f32 x) {
  const dhp_ct_u32 bits = dhp_ct_bits(x);
  const dhp_ct_u32 sqrt_half = dhp_ct_splat_u32(0x3f3504f3u); /* the float32 nearest to sqrt(1/2) */
  const dhp_ct_i32 e = (dhp_ct_i32)(bits - sqrt_half) >> 23;  /* 23: mantissa bits */
  const dhp_ct_f32 f = dhp_ct_float(bits - ((dhp_ct_u32)e << 23)) - 1.f;
  const dhp_ct_f32 to_float = dhp_ct_splat(0x1.8p23f); /* ulp 1: e in its low bits is e as a float */
  const dhp_ct_f32 exponent = dhp_ct_float(dhp_ct_bits(to_float) + (dhp_ct_u32)e) - to_float;

  dhp_ct_f32 p = dhp_ct_splat(-0.07634497f);
  p = dhp_ct_horner(p, f, 0.12761576f);
  p = dhp_ct_horner(p, f, -0.13160183f);
  p = dhp_ct_horner(p, f, 0.14201759f);
  p = dhp_ct_horner(p, f, -0.16623357f);
  p = dhp_ct_horner(p, f, 0.20001227f);
  p = dhp_ct_horner(p, f, -0.2500082f);
  p = dhp_ct_horner(p, f, 0.3333333f);
  p = dhp_ct_horner(p, f, -0.5f);

  /* The high part has 12 bits: its product with the exponent is exact. */
  const dhp_ct_f32 ln2_high = dhp_ct_splat(0x1.62ep-1f), ln2_low = dhp_ct_splat(0x1.0bfbe8p-15f);
  const dhp_ct_f32 y = dhp_ct_fma(exponent, ln2_high, f + dhp_ct_fma(f * f, p, exponent * ln2_low));

  const dhp_ct_u32 infinity = dhp_ct_splat_u32(0x7f800000u);
  const dhp_ct_u32 is_special = dhp_ct_equal_u32(bits & infinity, infinity); /* +inf or NaN: x itself */
  const dhp_ct_u32 is_zero = dhp_ct_equal_u32(bits & infinity, dhp_ct_splat_u32(0));
  return dhp_ct_select(is_zero, dhp_ct_splat(-__builtin_inff()), dhp_ct_select(is_special, x, y));
}

/*
 * 1 / x within 1.5 ulp for x >= 0 whose reciprocal is a normal number: x = 2^e m with m in [1, 2), Newton's iteration
 * on m. 0 (and a subnormal) to +inf, +inf to 0, NaN to NaN.
 */
DHP_CT dhp_ct_f32 dhp_ct_reciprocal(dhp_ct_f32 x) {
  const dhp_ct_u32 bits = dhp_ct_bits(x);
  const dhp_ct_u32 exponent = bits & 0x7f800000u;
  const dhp_ct_f32 m = dhp_ct_float((bits & 0x007fffffu) | 0x3f800000u);
  const dhp_ct_f32 one = dhp_ct_splat(1.f);
  dhp_ct_f32 y = dhp_ct_fma(m, dhp_ct_splat(-8.f / 17.f), dhp_ct_splat(24.f / 17.f)); /* the best line: error 1/17 */
  for (int i = 0; i < 3; i++) /* the relative error squares: 3e-3, 1e-5, 1e-10 */
    y = dhp_ct_fma(y, dhp_ct_fma(-m, y, one), y);
  y = y * dhp_ct_float(0x7f000000u - exponent); /* 2^-e */

  const dhp_ct_f32 infinity = dhp_ct_splat(__builtin_inff());
  y = dhp_ct_select(dhp_ct_equal_u32(exponent, dhp_ct_splat_u32(0)), infinity, y);
  y = dhp_ct_select(dhp_ct_equal_u32(bits, dhp_ct_bits(infinity)), dhp_ct_splat(0.f), y);
  return dhp_ct_select(dhp_ct_is_nan(x), x, y);
}

/* Overwrites n bytes of secret scratch memory; the barrier keeps the compiler from dropping a store before free(). */
DHP_CT void dhp_ct_wipe(void *memory, size_t n) {
  __builtin_memset(memory, 0, n);
  __asm__ volatile("" : : "r"(memory) : "memory");
}

#endif

#endif
