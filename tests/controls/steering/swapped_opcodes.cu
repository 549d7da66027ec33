// control: expects sass=branch counters=caught bitwise=blind timing=may
// A value chooses between additions and multiplications, and nothing else: either way there are as many instructions,
// branches taken and branches not taken. Only counts of single opcodes differ.

__device__ float add(float x) {
#pragma unroll
  for (int i = 0; i < 16; i++)
    asm volatile("add.f32 %0, %0, 0f3E800000;" : "+f"(x));
  return x;
}

__device__ float multiply(float x) {
#pragma unroll
  for (int i = 0; i < 16; i++)
    asm volatile("mul.f32 %0, %0, 0f3F400000;" : "+f"(x));
  return x;
}

// Of an if, one side falls through and then jumps over the other. So there are two: who jumps over the other side in
// the first is jumped to in the second. That both have the same condition is hidden from the compiler, so that it does
// not make one of them.
extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  int adds = secret[0] > 0.f, again;
  asm volatile("mov.b32 %0, %1;" : "=r"(again) : "r"(adds));
  x = adds ? add(x) : multiply(x);
  x = again ? add(x) : multiply(x);
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = multiply(add(secret[threadIdx.x]));
}
