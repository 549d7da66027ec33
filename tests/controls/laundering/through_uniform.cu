// control: expects sass=descriptor counters=caught bitwise=may timing=may
// A value goes through a uniform register and becomes the size of a bulk copy.

extern "C" __global__ void leak(const float *secret, float *out) {
  __shared__ __align__(16) float tile[128];
  tile[threadIdx.x] = secret[threadIdx.x];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  unsigned bytes = 16 + ((int)secret[0] & 0xf0);
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\n"
               "@p cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;}\n"
               "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::"l"(out),
               "r"((unsigned)__cvta_generic_to_shared(tile)), "r"(bytes)
               : "memory");
}

extern "C" __global__ void clean(const float *secret, float *out) {
  __shared__ __align__(16) float tile[128];
  tile[threadIdx.x] = secret[threadIdx.x];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\n"
               "@p cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;}\n"
               "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::"l"(out),
               "r"((unsigned)__cvta_generic_to_shared(tile)), "r"(256)
               : "memory");
}
