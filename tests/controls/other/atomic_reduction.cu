// control: expects sass=blind counters=blind bitwise=caught timing=blind
// The order of the additions varies from run to run, and with it the last bits: for the bitwise gate to catch.
// secret: as many floats as there are threads in the grid. out: one sum (leak), one sum per warp of the block (clean).

extern "C" __global__ void leak(const float *secret, float *out) {
  atomicAdd(out, secret[blockIdx.x * blockDim.x + threadIdx.x]);
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[blockIdx.x * blockDim.x + threadIdx.x];
#pragma unroll
  for (int lane = 16; lane; lane /= 2)
    x += __shfl_xor_sync(~0u, x, lane);
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
