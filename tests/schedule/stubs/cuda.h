/*
 * cuda.h - stands in for CUDA when the kernel is compiled for the host: the keywords mean nothing, and the built-in
 * variables are those of lane 0 of the warp that runs. Shuffles return the lane's own value, as if all lanes had the
 * same.
 */
#ifndef SCHEDULE_CUDA_H
#define SCHEDULE_CUDA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../simulator.h"

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

/* A tensor map is the name of its tensor. */
typedef struct CUtensorMap {
  int tensor;
} CUtensorMap;

struct float4 {
  float x, y, z, w;
};

struct float2 {
  float x, y;
};

struct Index {
  unsigned x;
};
extern Index blockIdx, gridDim;
#define threadIdx (Index{32u * (unsigned)sim::warp_index()})

static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int) { return x; }
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned by) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> by % 32);
}
static inline uint32_t __ballot_sync(unsigned, bool x) { return x ? ~0u : 0; }
static inline void __syncwarp() { sim::sync_warp(); }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline int __float2int_rn(float x) { return isnan(x) ? 0 : (int)rintf(x); }
static inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline void __syncthreads() { sim::named_barrier(0, 32 * sim::warp_count(), true); }

#endif
