// control: expects sass=branch counters=caught bitwise=blind timing=may
// A value rests in a spill slot before it is branched on: 48 live values do not fit the 32 registers of these bounds.

constexpr int LIVE = 48;

extern "C" __global__ void __launch_bounds__(1024, 2) leak(const float *secret, float *out) {
  float x = secret[threadIdx.x], live[LIVE];
#pragma unroll
  for (int i = 0; i < LIVE; i++) {
    live[i] = secret[threadIdx.x * LIVE + i];
    asm volatile("" : "+f"(live[i]));
  }
#pragma unroll
  for (int i = 0; i < LIVE; i++)
    out[128 + threadIdx.x * LIVE + i] = live[LIVE - 1 - i];
  if (x > 0.f) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      x = x * x + 0.5f;
  }
  out[threadIdx.x] = x;
}

// The slots beside those of the secrets hold public indices, which come back public.
extern "C" __global__ void __launch_bounds__(1024, 2) clean(const float *secret, float *out) {
  int index[LIVE];
  float live[LIVE];
#pragma unroll
  for (int i = 0; i < LIVE; i++) {
    index[i] = threadIdx.x * LIVE + i; // no two threads write the same place
    live[i] = secret[index[i]];
    asm volatile("" : "+f"(live[i]), "+r"(index[i]));
  }
#pragma unroll
  for (int i = 0; i < LIVE; i++)
    out[index[i]] = live[LIVE - 1 - i];
}
