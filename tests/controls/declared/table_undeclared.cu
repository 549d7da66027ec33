// control: expects sass=address counters=caught bitwise=blind timing=may public=16
// That one pointer is declared says nothing of another: a row of the secret steers as if it were a table.

extern "C" __global__ void leak(const float *secret, float *out, const int *table) {
  const int *other = (const int *)secret;
  out[threadIdx.x] = secret[128 + (table[threadIdx.x] ^ (other[threadIdx.x] >> 20 & 127))];
}

extern "C" __global__ void clean(const float *secret, float *out, const int *table) {
  const int *other = (const int *)secret;
  out[threadIdx.x] = secret[128 + table[threadIdx.x]] + (float)(other[threadIdx.x] >> 20 & 127);
}
