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

struct int4 {
  int x, y, z, w;
};

struct uint4 {
  uint32_t x, y, z, w;
};

struct Index {
  unsigned x;
};

static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline float __fmul_rn(float a, float b) { return a * b; } /* -ffp-contract=off: rounded */
static inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t by) {
  return by < 32 ? (uint32_t)(((uint64_t)high << 32 | low) << by >> 32) : low;
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31));
}
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
/* To an integer, saturating; NaN to 0. */
static inline int to_integer(float x) {
  return isnan(x) ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : (int)x;
}
static inline int __float2int_rn(float x) { return to_integer(rintf(x)); }
static inline int __float2int_rd(float x) { return to_integer(floorf(x)); }
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
