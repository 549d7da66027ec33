/* divisor.cuh - division by a number that the host knows, without dividing. */
#ifndef DHP_DIVISOR_CUH
#define DHP_DIVISOR_CUH

#include "divisor.h"

/* n / d. */
static __device__ __forceinline__ int quotient(int n, dhp_divisor by) {
  return (int)(__umulhi(2 * (uint32_t)n, by.multiplier) >> by.shift);
}

#endif
