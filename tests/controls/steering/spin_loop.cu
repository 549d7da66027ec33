// control: expects sass=literal counters=caught bitwise=blind timing=blind
// Waiting by spinning: the barrier's state is public, but the number of rounds is not fixed. It depends on when the
// last warp has its data, from eight places in memory.

__device__ float sum_of_eight(const float *secret) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++)
    sum += secret[i * 2048 + threadIdx.x];
  return sum;
}

__device__ unsigned arrive(unsigned long long *word, float *tile, float x) {
  unsigned address = (unsigned)__cvta_generic_to_shared(word);
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\n"
               "@p mbarrier.init.shared::cta.b64 [%0], 128;}" ::"r"(address)
               : "memory");
  __syncthreads();
  tile[threadIdx.x] = x; // in order: a warp arrives when its data have
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  return address;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  __shared__ unsigned long long word;
  __shared__ float tile[128];
  unsigned address = arrive(&word, tile, sum_of_eight(secret)), done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(address)
                 : "memory");
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  __shared__ unsigned long long word;
  __shared__ float tile[128];
  unsigned address = arrive(&word, tile, sum_of_eight(secret)), done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0, %2;\n"
               "@!p mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0, %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(address), "r"(10000000) // a warp may be suspended for 10 ms
               : "memory");
  float poison = done ? 0.f : __int_as_float(0x7fffffff); // NaN if it was not enough
  out[threadIdx.x] = tile[threadIdx.x ^ 1] + poison;
}
