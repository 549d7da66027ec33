// control: expects sass=clock counters=may bitwise=may timing=caught
// Spins for as many clock cycles as the secret says: for the timing gate, which sets them to multiples of the smallest
// difference that it says it can find. The twin takes the same time whatever the secret.

extern "C" __global__ void leak(const float *secret, float *out) {
  unsigned cycles = (unsigned)secret[0], start = clock(), passed;
  do
    passed = clock() - start; // unsigned: right across a wrap-around
  while (passed < cycles);
  out[threadIdx.x] = (float)passed;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[0];
#pragma unroll
  for (int i = 0; i < 512; i++) // about 2,000 cycles, each addition waiting for the one before it
    x = x * 0.5f + 1.f;
  out[threadIdx.x] = x;
}
