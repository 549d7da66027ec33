// control: expects sass=address counters=caught bitwise=blind timing=may public=16
// Numbers of the table go through shared memory, where a secret is put in the place of one: what comes out of there is
// not declared.

extern "C" __global__ void leak(const float *secret, float *out, const int *table) {
  __shared__ int tile[128];
  tile[threadIdx.x] = table[threadIdx.x];
  __syncthreads();
  if (threadIdx.x % 32 != 0) tile[threadIdx.x] = (int)secret[threadIdx.x] & 127;
  __syncthreads();
  out[threadIdx.x] = secret[128 + tile[threadIdx.x ^ 1]];
}

extern "C" __global__ void clean(const float *secret, float *out, const int *table) {
  __shared__ int tile[128];
  tile[threadIdx.x] = table[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = secret[128 + table[threadIdx.x ^ 1]] + (float)tile[threadIdx.x ^ 1];
}
