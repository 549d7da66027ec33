// control: expects sass=branch counters=caught bitwise=blind timing=caught
// As many rounds as a value says.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x], sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < (int)x; i++)
    sum = sum * 0.5f + x;
  out[threadIdx.x] = sum;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x], sum = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float counts = __saturatef(x - i); // 0 from round x on
    sum = sum * (1.f - 0.5f * counts) + counts * x;
  }
  out[threadIdx.x] = sum;
}
