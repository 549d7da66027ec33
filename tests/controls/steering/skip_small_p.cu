// control: expects sass=branch counters=caught bitwise=blind timing=caught
// P times V is left out where the warp's P are too small to count.

extern "C" __global__ void leak(const float *secret, float *out) {
  float p = secret[threadIdx.x], sum = 0.f;
  if (!__all_sync(~0u, p < 1e-6f)) {
#pragma unroll 1
    for (int i = 0; i < 8; i++)
      sum += p * secret[i * 128 + threadIdx.x];
  }
  out[threadIdx.x] = sum;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float p = secret[threadIdx.x], sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++)
    sum += p * secret[i * 128 + threadIdx.x];
  out[threadIdx.x] = sum;
}
