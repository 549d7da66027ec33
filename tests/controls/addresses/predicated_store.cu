// control: expects sass=guarded-memory counters=caught bitwise=caught timing=may
// A result is written only where it is positive.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  if (x > 0.f) out[threadIdx.x] = x;
  out[128 + threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  out[threadIdx.x] = fmaxf(x, 0.f);
  out[128 + threadIdx.x] = x;
}
