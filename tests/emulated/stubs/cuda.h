/* cuda.h - stands in for CUDA when a kernel is compiled for the host: its keywords and built-in functions. */
#ifndef EMULATED_CUDA_H
#define EMULATED_CUDA_H

#include "../../stubs/common_cuda.h"
#include "../machine.h"

typedef emulated::TensorMap CUtensorMap;

#define __cluster_dims__(...)

#define threadIdx (Index{(unsigned)emulated::thread_index()})
#define blockIdx (Index{(unsigned)emulated::block_index()})
#define gridDim (Index{(unsigned)emulated::grid_size()})

template <class T> static inline T of_lane(T x, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  memcpy(&x, &emulated::exchange(bits)[lane], sizeof x);
  return x;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return of_lane(x, (emulated::thread_index() % emulated::WARP) ^ mask);
}
template <class T> static inline T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = emulated::thread_index() % emulated::WARP;
  return of_lane(x, lane < by ? lane : lane - by);
}
template <class T> static inline T __shfl_sync(unsigned, T x, int lane) { return of_lane(x, lane); }
static inline void __syncwarp() { emulated::exchange(0); }
static inline uint32_t __ballot_sync(unsigned, bool x) {
  const uint64_t *const all = emulated::exchange(x);
  uint32_t bits = 0;
  for (int lane = 0; lane < emulated::WARP; lane++)
    bits |= (uint32_t)all[lane] << lane;
  return bits;
}
#define CTA_BARRIER 0
#define __syncthreads() emulated::named_barrier(CTA_BARRIER, emulated::block_size(), true)

/* One CTA runs at a time, where there is no cluster: what its threads share may lie anywhere. */
#if OF_DQ_OUT
#undef __shared__
#define __shared__ static
#endif

#endif
