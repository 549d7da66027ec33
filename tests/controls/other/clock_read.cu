// control: expects sass=clock counters=blind bitwise=caught timing=blind
// A kernel that can measure time can act on it.

extern "C" __global__ void leak(const float *secret, float *out) {
  long long start = clock64();
  float x = secret[threadIdx.x];
  out[threadIdx.x] = x + (float)(clock64() - start);
}

extern "C" __global__ void clean(const float *secret, float *out) { out[threadIdx.x] = secret[threadIdx.x]; }
