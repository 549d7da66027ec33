// control: expects sass=address counters=caught bitwise=may timing=may
// A value chooses the shared-memory bank: the same number of accesses, but a different number of passes.

__device__ float shared_at(const float *secret, int stride) {
  __shared__ float tile[128];
  tile[threadIdx.x] = secret[threadIdx.x];
  __syncthreads();
  return tile[threadIdx.x * stride & 127]; // an even stride makes lanes meet in a bank
}

extern "C" __global__ void leak(const float *secret, float *out) {
  out[threadIdx.x] = shared_at(secret, 1 + ((int)secret[0] & 31));
}

extern "C" __global__ void clean(const float *secret, float *out) { out[threadIdx.x] = shared_at(secret, 33); }
