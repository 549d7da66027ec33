/* cuda.h - stands in for CUDA when a kernel is compiled for the host: its keywords and built-in functions. */
#ifndef EMULATED_CUDA_H
#define EMULATED_CUDA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../machine.h"

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

typedef emulated::TensorMap CUtensorMap;

struct Index {
  unsigned x;
};
#define threadIdx (Index{(unsigned)emulated::thread_index()})
#define blockIdx (Index{(unsigned)emulated::block_index()})
#define gridDim (Index{(unsigned)emulated::grid_size()})

static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
template <class T> static inline T of_lane(T x, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  memcpy(&x, &emulated::exchange(bits)[lane], sizeof x);
  return x;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return of_lane(x, (emulated::thread_index() % emulated::WARP) ^ mask);
}
template <class T> static inline T __shfl_sync(unsigned, T x, int lane) { return of_lane(x, lane); }
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
#define CTA_BARRIER 0
#define __syncthreads() emulated::named_barrier(CTA_BARRIER, CTA_THREADS, true)

#endif
