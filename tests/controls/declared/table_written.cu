// control: expects sass=declared-memory counters=may bitwise=may timing=may public=16
// A kernel would write a secret into the table that is declared public, for the next one to follow. The store is for
// blocks that no launch of the gates has.

extern "C" __global__ void leak(const float *secret, float *out, int *table) {
  if (blockIdx.y == 65534) table[threadIdx.x] = (int)secret[threadIdx.x] & 127;
  out[table[threadIdx.x]] = secret[threadIdx.x];
}

extern "C" __global__ void clean(const float *secret, float *out, int *table) {
  if (blockIdx.y == 65534) out[threadIdx.x] = (float)((int)secret[threadIdx.x] & 127);
  out[table[threadIdx.x]] = secret[threadIdx.x];
}
