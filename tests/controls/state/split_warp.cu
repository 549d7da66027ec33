// control: expects sass=address counters=may bitwise=may timing=may
// The lanes of a warp that has split meet for one shuffle: half of them bring a secret, the others take it as an index.

extern "C" __global__ void leak(const float *secret, float *out) {
  if (threadIdx.x & 1) {
    float x = secret[threadIdx.x];
    out[threadIdx.x] = __shfl_xor_sync(~0u, x, 1);
  } else {
    float neighbour = __shfl_xor_sync(~0u, (float)blockIdx.x, 1);
    out[128 + ((int)neighbour & 127)] = 1.f;
  }
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = __shfl_xor_sync(~0u, secret[threadIdx.x], 1);
  float block = __shfl_xor_sync(~0u, (float)blockIdx.x, 1);
  out[threadIdx.x + 128 * ((int)block & 1)] = x;
}
