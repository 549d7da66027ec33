// control: expects sass=guarded-arithmetic counters=caught bitwise=blind timing=blind
// An addition under a predicate: issued always, but counted per thread only where the predicate holds.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  asm volatile("{.reg .pred p; setp.gt.f32 p, %0, 0f3F800000; @p add.f32 %0, %0, %0;}" : "+f"(x));
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  int mask = -(x > 1.f); // a plain ?: may become a predicated instruction
  out[threadIdx.x] = x + __int_as_float(__float_as_int(x) & mask);
}
