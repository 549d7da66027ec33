// control: expects sass=branch counters=caught bitwise=blind timing=caught
// A tile whose maximum does not exceed the running one is skipped.

__device__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2)
    x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  float maximum = -1e30f, sum = 0.f;
#pragma unroll 1
  for (int tile = 0; tile < 4; tile++) {
    float x = secret[tile * 128 + threadIdx.x], top = warp_max(x);
    if (top <= maximum) continue;
    maximum = top;
#pragma unroll 1
    for (int i = 0; i < 8; i++)
      sum = sum * maximum + x;
  }
  out[threadIdx.x] = sum;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float maximum = -1e30f, sum = 0.f;
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    float x = secret[tile * 128 + threadIdx.x];
    maximum = fmaxf(maximum, warp_max(x));
#pragma unroll
    for (int i = 0; i < 8; i++)
      sum = sum * maximum + x;
  }
  out[threadIdx.x] = sum;
}
