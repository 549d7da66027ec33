// control: expects sass=literal counters=caught bitwise=blind timing=blind
// Waiting by spinning: the barrier's state is public, but the number of rounds is not fixed.

__device__ unsigned barrier_init(unsigned long long *word) {
  unsigned address = (unsigned)__cvta_generic_to_shared(word);
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\n"
               "@p mbarrier.init.shared::cta.b64 [%0], 128;}" ::"r"(address)
               : "memory");
  __syncthreads();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  return address;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  __shared__ unsigned long long word;
  unsigned address = barrier_init(&word), done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(address)
                 : "memory");
  out[threadIdx.x] = secret[threadIdx.x];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  __shared__ unsigned long long word;
  unsigned address = barrier_init(&word), done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0, %2;\n"
               "@!p mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0, %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(address), "r"(10000000) // a warp may be suspended for 10 ms
               : "memory");
  float x = secret[threadIdx.x], poison = done ? 0.f : __int_as_float(0x7fffffff); // NaN if it was not enough
  out[threadIdx.x] = x + poison;
}
