// control: expects sass=address counters=may bitwise=may timing=may
// An atomic on 64-bit floats returns a pair of registers; the upper one becomes the index of a load. Adding -0 leaves
// what each thread has put into its own slot.

__device__ inline double touch_pair(const float *secret, float *out) {
  double *slot = reinterpret_cast<double *>(out + 1024) + threadIdx.x;
  reinterpret_cast<volatile float *>(slot)[0] = 0.f;
  reinterpret_cast<volatile float *>(slot)[1] = secret[threadIdx.x];
  return atomicAdd(slot, -0.0);
}

extern "C" __global__ void leak(const float *secret, float *out) {
  int upper = __double2hiint(touch_pair(secret, out));
  out[threadIdx.x] = secret[128 + ((upper >> 20) & 127)];
}

extern "C" __global__ void clean(const float *secret, float *out) {
  int upper = __double2hiint(touch_pair(secret, out));
  out[threadIdx.x] = secret[128 + threadIdx.x] + static_cast<float>((upper >> 20) & 127);
}
