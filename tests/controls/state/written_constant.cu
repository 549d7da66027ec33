// control: expects sass=constant counters=may bitwise=may timing=may
// A kernel would write a secret into constant memory, through its generic address, and take an index from there. The
// store is for blocks that no launch of the gates has: on a GPU that protects its constants it would end the process.

__constant__ float written_table[128];

extern "C" __global__ void leak(const float *secret, float *out) {
  float *alias = (float *)written_table;
  asm volatile("" : "+l"(alias)); // the compiler would trap where it knows that this is constant memory
  float x = secret[threadIdx.x];
  if (blockIdx.y == 65534) alias[threadIdx.x] = x;
  __syncthreads();
  out[(int)written_table[blockIdx.x & 127] & 127] = 1.f;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  const float *alias = written_table;
  asm volatile("" : "+l"(alias));
  out[threadIdx.x] = secret[threadIdx.x] + alias[blockIdx.x & 127] + written_table[blockIdx.x & 127];
}
