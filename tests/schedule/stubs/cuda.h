/*
 * cuda.h - stands in for CUDA when the kernel is compiled for the host: the keywords mean nothing, and the built-in
 * variables are those of lane 0 of the warp that runs. Shuffles return the lane's own value, as if all lanes had the
 * same.
 */
#ifndef SCHEDULE_CUDA_H
#define SCHEDULE_CUDA_H

#include "../../stubs/common_cuda.h"
#include "../simulator.h"

/* A tensor map is the name of its tensor. */
typedef struct CUtensorMap {
  int tensor;
} CUtensorMap;

struct float4 {
  float x, y, z, w;
};

extern Index blockIdx, gridDim;
#define threadIdx (Index{32u * (unsigned)sim::warp_index()})

template <class T> static inline T __shfl_xor_sync(unsigned, T x, int) {
  sim::meet_lanes();
  return x;
}
template <class T> static inline T __shfl_sync(unsigned, T x, int) { return x; }
static inline uint32_t __ballot_sync(unsigned, bool x) { return x ? ~0u : 0; }
static inline void __syncwarp() { sim::sync_warp(); }
static inline void __syncthreads() { sim::named_barrier(0, 32 * sim::warp_count(), true); }

#endif
