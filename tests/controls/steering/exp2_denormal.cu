// control: expects sass=guarded-arithmetic counters=caught bitwise=blind timing=blind
// exp2f without flush to zero rescales its argument and result under a predicate where the result is denormal.

extern "C" __global__ void leak(const float *secret, float *out) { out[threadIdx.x] = exp2f(secret[threadIdx.x]); }

extern "C" __global__ void clean(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  out[threadIdx.x] = x;
}
