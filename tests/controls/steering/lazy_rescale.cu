// control: expects sass=branch counters=caught bitwise=blind timing=caught
// The accumulators are rescaled only if a vote says that some row's maximum has grown.

__device__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x], maximum = secret[128 + threadIdx.x], scale = 1.f;
  if (__any_sync(~0u, x > maximum)) {
#pragma unroll 1
    for (int i = 0; i < 16; i++)
      scale = scale * ex2(maximum - x);
  }
  out[threadIdx.x] = scale;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x], maximum = secret[128 + threadIdx.x], scale = 1.f;
#pragma unroll
  for (int i = 0; i < 16; i++)
    scale = scale * ex2(maximum - fmaxf(x, maximum));
  out[threadIdx.x] = scale;
}
