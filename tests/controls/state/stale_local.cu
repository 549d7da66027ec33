// control: expects sass=address counters=may bitwise=may timing=may
// An index comes from local memory that this kernel has not written: what another one left there may be a secret.

extern "C" __global__ void leak(const float *secret, float *out) {
  volatile int index[16];
  index[blockIdx.x & 7] = 1;
  index[4] = 2;
  out[index[threadIdx.x & 15] & 127] = secret[threadIdx.x];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  volatile int index[16];
#pragma unroll
  for (int i = 0; i < 16; i++)
    index[i] = i;
  index[blockIdx.x & 7] = 1;
  out[threadIdx.x] = secret[threadIdx.x + index[threadIdx.x & 15]];
}
