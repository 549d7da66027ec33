// control: expects sass=tensor-map counters=may bitwise=may timing=may
// A secret becomes a dimension of a tensor map in global memory, which the next copies through it would follow.

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = secret[threadIdx.x];
  asm volatile("tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 0, %1;\n"
               "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(out),
               "r"(__float_as_int(x) & 1023)
               : "memory");
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = __int_as_float(__float_as_int(secret[threadIdx.x]) & 1023);
}
