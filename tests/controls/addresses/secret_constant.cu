// control: expects sass=address counters=caught bitwise=blind timing=caught
// A value is the index into a table in constant memory, which is serialised over the different addresses of a warp.

__constant__ float table[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

extern "C" __global__ void leak(const float *secret, float *out) {
  int index = (int)secret[threadIdx.x] & 15;
  out[threadIdx.x] = table[index];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = secret[threadIdx.x] + table[blockIdx.x & 15];
}
