/*
 * row_bounds.cuh - how large the elements of a row are, in base 2: for the units in which shares of dq are added up.
 *
 * A row's largest |element| comes first. A power of two made of its exponent brings the row to where squares neither
 * overflow nor vanish: the row 0 stays 0, Inf and NaN stay.
 *
 * CT: elements only ever meet masks that are public, comparisons of integers that select, shifts, multiplications and
 * the logarithm of ct.h.
 */
#ifndef DHP_ROW_BOUNDS_CUH
#define DHP_ROW_BOUNDS_CUH

#include "../ct.h"
#include "ptx.cuh"

enum { KEYS_OF_TILE = 128 }; /* over so many keys run the maxima of ../families/bounds */

/* Of a query row; negative: it sees none. */
static __device__ __forceinline__ int last_key_seen(int row, int causal_offset, int seqlen_k) {
  return min(row + causal_offset, seqlen_k - 1);
}

/* Eight elements, or zeros. */
static __device__ __forceinline__ uint4 masked(uint4 x, uint32_t mask) {
  return make_uint4(x.x & mask, x.y & mask, x.z & mask, x.w & mask);
}

static __device__ __forceinline__ float2 max_or_nan(float2 a, float2 b) {
  return make_float2(max_or_nan(a.x, b.x), max_or_nan(a.y, b.y));
}

/* The largest |element| of eight, in the low half; NaN if one is NaN: without signs, floats are in the order of their
 * bits, and a NaN comes last. */
static __device__ __forceinline__ uint32_t largest_of_eight(uint4 x) {
  const uint32_t no_signs = 0x7fff7fffu;
  const uint32_t two =
      larger_halves(larger_halves(x.x & no_signs, x.y & no_signs), larger_halves(x.z & no_signs, x.w & no_signs));
  return larger_halves(two, two >> 16) & 0xffffu;
}

/* A power of two, a normal number, that brings x >= 0 to [1, 4); a subnormal x, below. Inf and NaN stay. */
static __device__ __forceinline__ float power_for(float x) {
  const uint32_t mantissa_bits = 23, exponent = min(__float_as_uint(x) >> mantissa_bits, 253u);
  return __uint_as_float((254u - exponent) << mantissa_bits);
}

/* log2(1 / power), of such a power. */
static __device__ __forceinline__ float log2_removed(float power) {
  return (float)(127 - (int32_t)(__float_as_uint(power) >> 23));
}

/* The squares of eight elements times the power, added up in order. */
static __device__ __forceinline__ float squares_of_eight(const float *x, float power) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++)
    sum = fmaf(x[i] * power, x[i] * power, sum);
  return sum;
}

/* log2 of the norm of a row whose elements times the power have this sum of squares. */
static __device__ __forceinline__ float log2_norm(float squares, float power) {
  return fmaf(dhp_ct_log2(squares), 0.5f, log2_removed(power));
}

#endif
