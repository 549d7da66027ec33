// control: expects sass=address counters=caught bitwise=blind timing=may public=16
// A value is the index into a table that is declared public: what is read there follows the value, and so does where.

extern "C" __global__ void leak(const float *secret, float *out, const int *table) {
  int index = (int)secret[threadIdx.x] & 127;
  out[threadIdx.x] = (float)table[index];
}

extern "C" __global__ void clean(const float *secret, float *out, const int *table) {
  int index = (int)secret[threadIdx.x] & 127;
  out[threadIdx.x] = secret[128 + table[threadIdx.x]] + (float)index;
}
