// control: expects sass=branch counters=caught bitwise=blind timing=caught
// A value comes from another lane, and the receiver branches on it.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = __shfl_xor_sync(~0u, secret[threadIdx.x], 1);
  if (x > 0.f) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      x = x * x + 0.5f;
  }
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = fmaxf(__shfl_xor_sync(~0u, secret[threadIdx.x], 1), 0.f);
}
