// control: expects sass=address counters=may bitwise=may timing=may
// An atomic on a vector of four floats returns four registers; the last one becomes the index of a load. Adding -0
// leaves what each thread has put into its own slots.

__device__ inline float touch_vector(const float *secret, float *out) {
  float *slots = out + 1024 + 4 * threadIdx.x;
  for (int i = 0; i < 4; i++)
    reinterpret_cast<volatile float *>(slots)[i] = secret[128 * i + threadIdx.x];
  float4 old;
  asm volatile("atom.global.v4.f32.add {%0, %1, %2, %3}, [%4], {%5, %5, %5, %5};"
               : "=f"(old.x), "=f"(old.y), "=f"(old.z), "=f"(old.w)
               : "l"(__cvta_generic_to_global(slots)), "f"(-0.f)
               : "memory");
  return old.w;
}

extern "C" __global__ void leak(const float *secret, float *out) {
  int last = __float_as_int(touch_vector(secret, out));
  out[threadIdx.x] = secret[128 + ((last >> 23) & 127)];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  int last = __float_as_int(touch_vector(secret, out));
  out[threadIdx.x] = secret[128 + threadIdx.x] + static_cast<float>((last >> 23) & 127);
}
