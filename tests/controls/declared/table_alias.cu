// control: expects sass=declared-memory counters=may bitwise=may timing=may public=16
// The same through another pointer, which public arithmetic leads to the table.

extern "C" __global__ void leak(const float *secret, float *out, const int *table) {
  float *alias = out;
  unsigned long long distance = (unsigned long long)table - (unsigned long long)out;
  asm volatile("add.u64 %0, %0, %1;" : "+l"(alias) : "l"(distance));
  float x = secret[threadIdx.x];
  if (blockIdx.y == 65534) alias[threadIdx.x] = x;
  out[table[threadIdx.x]] = x;
}

extern "C" __global__ void clean(const float *secret, float *out, const int *table) {
  float x = secret[threadIdx.x];
  if (blockIdx.y == 65534) out[threadIdx.x] = x;
  out[table[threadIdx.x]] = x;
}
