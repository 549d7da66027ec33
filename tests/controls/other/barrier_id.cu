// control: expects sass=barrier-operand counters=blind bitwise=blind timing=blind
// A value chooses the named barrier to wait at.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[0];
  asm volatile("bar.sync %0, 128;" ::"r"(1 + ((int)x & 7)) : "memory");
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[0];
  asm volatile("bar.sync %0, 128;" ::"r"(1 + ((int)blockIdx.x & 7)) : "memory");
  out[threadIdx.x] = x;
}
