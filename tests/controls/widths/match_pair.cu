// control: expects sass=address counters=may bitwise=may timing=may
// Lanes are matched by 64-bit keys, whose upper half is a value; how many lanes match becomes the index of a load.

__device__ inline int matching(unsigned high) {
  return __popc(__match_any_sync(~0u, static_cast<unsigned long long>(high) << 32 | blockIdx.y));
}

extern "C" __global__ void leak(const float *secret, float *out) {
  out[threadIdx.x] = secret[128 + 8 * matching(__float_as_uint(secret[threadIdx.x]))];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = secret[128 + 8 * matching(threadIdx.x >> 2)];
}
