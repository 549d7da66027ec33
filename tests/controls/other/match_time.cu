// control: expects sass=latency counters=may bitwise=may timing=caught
// How many values of a warp differ decides how long it takes to match them, whatever becomes of the result.

__device__ inline float matched_lanes(unsigned key) {
  unsigned lanes = 0;
#pragma unroll
  for (int i = 0; i < 64; i++)
    lanes += __match_any_sync(~0u, key + i * (lanes >> 31));
  return static_cast<float>(lanes);
}

extern "C" __global__ void leak(const float *secret, float *out) {
  out[threadIdx.x] = matched_lanes(__float_as_uint(secret[threadIdx.x]));
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = matched_lanes(threadIdx.x >> 2) + secret[threadIdx.x];
}
