// control: expects sass=branch counters=caught bitwise=blind timing=caught
// A value is passed to the neighbour through shared memory, and the neighbour branches on it.

extern "C" __global__ void leak(const float *secret, float *out) {
  __shared__ float tile[128];
  tile[threadIdx.x] = secret[threadIdx.x];
  __syncthreads();
  float x = tile[threadIdx.x ^ 1];
  if (x > 0.f) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      x = x * x + 0.5f;
  }
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  __shared__ float tile[128];
  tile[threadIdx.x] = secret[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = fmaxf(tile[threadIdx.x ^ 1], 0.f);
}
