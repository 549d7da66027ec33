// control: expects sass=address counters=caught bitwise=blind timing=blind
// A value chooses the shared-memory bank: the same number of accesses, but a different number of passes.

extern "C" __global__ void leak(const float *secret, float *out) {
  __shared__ float tile[128 * 33];
  int stride = 1 + ((int)secret[0] & 31);
  tile[threadIdx.x * stride] = secret[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  __shared__ float tile[128 * 33];
  tile[threadIdx.x * 33] = secret[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[(threadIdx.x ^ 1) * 33];
}
