// control: expects sass=call counters=caught bitwise=blind timing=caught
// 1.f / x calls a slow path where x or its reciprocal is denormal.

extern "C" __global__ void leak(const float *secret, float *out) { out[threadIdx.x] = 1.f / secret[threadIdx.x]; }

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  out[threadIdx.x] = x;
}
