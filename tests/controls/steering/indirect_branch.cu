// control: expects sass=indirect-branch counters=caught bitwise=blind timing=caught build=unbranch
// A branch on a value, made indirect by the build step that removes conditional branches: the literal count is 0.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  if (x > 0.f) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      x = x * x + 0.5f;
  }
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x], y = fmaxf(x, 0.f);
#pragma unroll 1
  for (int i = 0; i < 64; i++)
    y = y * y + 0.5f;
  out[threadIdx.x] = y + fminf(x, 0.f);
}
