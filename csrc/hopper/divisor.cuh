/* divisor.cuh - division by a number that is known before, without dividing. */
#ifndef DHP_DIVISOR_CUH
#define DHP_DIVISOR_CUH

#include "../ct.h"
#include "divisor.h"

/* n / d. */
static __device__ __forceinline__ int quotient(int n, dhp_divisor by) {
  return (int)(__umulhi(2 * (uint32_t)n, by.multiplier) >> by.shift);
}

/*
 * dhp_divisor_of for a number in [0, 2^31), without the branches of a division of 64 bits. `inverse` and its products
 * are right to 21 bits: the first quotient is wrong by less than 2^12, the second by less than 2.
 */
static __device__ __forceinline__ dhp_divisor divisor_of(int number) {
  const int d = max(number, 1);
  const uint32_t shift = 32 - (uint32_t)__clz(d - 1);
  const int64_t dividend = (int64_t)1 << (31 + shift);
  const float inverse = dhp_ct_reciprocal((float)d);
  int64_t result = (int64_t)((float)dividend * inverse);
  result += (int64_t)((float)(dividend - result * d) * inverse);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64_t rest = dividend - result * d;
    result += (rest >= d) - (rest < 0);
  }
  const dhp_divisor by = {(uint32_t)(result + 1), shift};
  return by;
}

#endif
