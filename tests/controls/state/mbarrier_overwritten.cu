// control: expects sass=mbarrier counters=may bitwise=may timing=may
// A secret is stored over an mbarrier's word, so that whether its phase has passed says what was stored.

static __device__ unsigned shared_address(const void *pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

static __device__ void init(unsigned barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
  __syncthreads();
}

static __device__ unsigned has_passed(unsigned barrier) {
  unsigned passed;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
               : "=r"(passed)
               : "r"(barrier)
               : "memory");
  return passed;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  __shared__ unsigned long long words[64]; // the first is the barrier, and the first floats of the tile
  float x = secret[threadIdx.x];
  init(shared_address(words));
  ((volatile float *)words)[threadIdx.x] = x;
  __syncthreads();
  out[threadIdx.x + 128 * has_passed(shared_address(words))] = 1.f;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  __shared__ unsigned long long barrier;
  __shared__ float tile[128];
  float x = secret[threadIdx.x];
  init(shared_address(&barrier));
  ((volatile float *)tile)[threadIdx.x] = x;
  __syncthreads();
  out[threadIdx.x + 128 * has_passed(shared_address(&barrier))] = tile[threadIdx.x ^ 1];
}
