// control: expects sass=address counters=caught bitwise=blind timing=may
// A value is the index of a load from global memory.

extern "C" __global__ void leak(const float *secret, float *out) {
  int index = (int)secret[threadIdx.x] & 127;
  out[threadIdx.x] = secret[128 + index];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  int index = (int)secret[threadIdx.x] & 127;
  out[threadIdx.x] = secret[128 + (threadIdx.x ^ 1)] + (float)index;
}
