// control: expects sass=blind counters=blind bitwise=caught timing=blind
// A sum over keys is split in two where the row is computed alone: for the bitwise gate, which computes rows alone and
// among others, to catch. The split depends on the grid, which is public, so no other gate has anything to say.
// One block for each row. secret: 32 values for each thread of a row. out: one sum for each thread.

__device__ void sums(const float *secret, float *whole, float *halves) {
  const float *row = secret + (blockIdx.x * blockDim.x + threadIdx.x) * 32;
  float first = 0.f, second = 0.f;
  *whole = 0.f;
#pragma unroll
  for (int key = 0; key < 32; key++) {
    *whole += row[key];
    *(key < 16 ? &first : &second) += row[key];
  }
  *halves = first + second;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  float whole, halves;
  sums(secret, &whole, &halves);
  out[blockIdx.x * blockDim.x + threadIdx.x] = gridDim.x == 1 ? halves : whole;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float whole, halves;
  sums(secret, &whole, &halves);
  out[blockIdx.x * blockDim.x + threadIdx.x] = whole;
}
