// control: expects sass=address counters=may bitwise=may timing=may
// The first warp contributes a secret to a reduction at a barrier; the others contribute none, but read its result.

static __device__ unsigned count(bool mine) {
  unsigned total;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; barrier.red.popc.aligned.u32 %0, 0, p;}"
               : "=r"(total)
               : "r"((unsigned)mine)
               : "memory");
  return total;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  if (threadIdx.x < 32) {
    float x = secret[threadIdx.x];
    count(x > 0.f);
    out[threadIdx.x] = x;
  } else {
    unsigned positive = count(false);
    out[128 + positive] = 1.f;
  }
}

extern "C" __global__ void clean(const float *secret, float *out) {
  unsigned low = count(threadIdx.x < 64);
  out[threadIdx.x] = secret[threadIdx.x + low];
}
