// control: expects sass=shuffle-lane counters=blind bitwise=blind timing=blind
// A value chooses the lane to read from.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  out[threadIdx.x] = __shfl_sync(~0u, x, (int)x & 31);
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = __shfl_sync(~0u, secret[threadIdx.x], (threadIdx.x + 5) & 31);
}
