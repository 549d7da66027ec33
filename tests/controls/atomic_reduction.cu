// control: expects sass=blind counters=blind bitwise=caught timing=blind
// The order of the additions varies from run to run, and with it the last bits: for the bitwise gate to catch.

extern "C" __global__ void leak(const float *secret, float *out) { atomicAdd(out, secret[threadIdx.x]); }

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x];
#pragma unroll
  for (int lane = 16; lane; lane /= 2)
    x += __shfl_xor_sync(~0u, x, lane);
  out[threadIdx.x] = x;
}
