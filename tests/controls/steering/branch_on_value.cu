// control: expects sass=branch counters=caught bitwise=blind timing=caught
// Work that is done only where a value is positive.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  if (x > 0.f) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      x = x * x + 0.5f;
  }
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x], y = fmaxf(x, 0.f);
#pragma unroll
  for (int i = 0; i < 64; i++)
    y = y * y + 0.5f;
  out[threadIdx.x] = y + fminf(x, 0.f);
}
