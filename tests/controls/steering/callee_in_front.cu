// control: expects sass=address counters=may bitwise=may timing=may build=relocatable
// A secret is loaded before a call and gathers behind it; the function lies at lower addresses than the kernel.

static __device__ __noinline__ float halved_and_shifted(float x, float by) { return x * 0.5f + by; }

extern "C" __global__ void leak(const float *secret, float *out) {
  float index = secret[threadIdx.x];
  float y = halved_and_shifted((float)threadIdx.x, (float)blockIdx.x);
  out[threadIdx.x] = secret[128 + ((int)index & 127)] + y;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  float y = halved_and_shifted((float)threadIdx.x, (float)blockIdx.x);
  out[threadIdx.x] = secret[128 + threadIdx.x] + x + y;
}
