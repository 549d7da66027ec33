// control: expects sass=address counters=may bitwise=may timing=may
// Lanes are matched by 64-bit keys, whose upper half is a value; how many lanes match becomes the index of a load.

__device__ inline int matching(const float *secret) {
  unsigned long long key = static_cast<unsigned long long>(__float_as_uint(secret[threadIdx.x])) << 32 | blockIdx.y;
  return __popc(__match_any_sync(~0u, key));
}

extern "C" __global__ void leak(const float *secret, float *out) {
  out[threadIdx.x] = secret[128 + 8 * matching(secret)];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = secret[128 + threadIdx.x] + static_cast<float>(matching(secret));
}
