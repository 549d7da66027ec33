/* common_cuda.h - CUDA's keywords, which mean nothing on the host, and those of its functions that ask no other thread.
 */
#ifndef STUBS_COMMON_CUDA_H
#define STUBS_COMMON_CUDA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 {
  float x, y;
};

struct Index {
  unsigned x;
};

static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline float __fmul_rn(float a, float b) { return a * b; } /* -ffp-contract=off: rounded */
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

#endif
