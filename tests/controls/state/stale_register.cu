// control: expects sass=address counters=may bitwise=may timing=may
// An index comes from an array that the compiler keeps in registers, from an element that was never written.

extern "C" __global__ void leak(const float *secret, float *out) {
  volatile int index[16];
  index[4 + (blockIdx.x & 3)] = 5;
  out[index[3] & 127] = secret[threadIdx.x];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  int index[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    index[i] = i * gridDim.x;
  out[threadIdx.x + (index[blockIdx.x & 3] & 127)] = secret[threadIdx.x];
}
