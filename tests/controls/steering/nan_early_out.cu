// control: expects sass=exit counters=caught bitwise=blind timing=may
// A thread that meets a NaN is done.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  if (x != x) return;
  float y = secret[128 + threadIdx.x];
  out[threadIdx.x] = x * y;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x], y = secret[128 + threadIdx.x];
  out[threadIdx.x] = x * y;
}
