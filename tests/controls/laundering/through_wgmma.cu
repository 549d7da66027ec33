// control: expects sass=branch counters=caught bitwise=blind timing=caught
// A product of the tensor cores is branched on.

__device__ float first_of_product(const float *secret) {
  __shared__ __align__(1024) unsigned tile[1024]; // A, then B: 64 by 16 and 16 by 8 halves, no swizzle
#pragma unroll
  for (int i = 0; i < 8; i++)
    tile[i * 128 + threadIdx.x] = __float_as_uint(secret[i * 128 + threadIdx.x]);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  // matrix descriptor: address / 16, leading and stride byte offsets 128 and 256 (PTX ISA, wgmma)
  unsigned long long a = (__cvta_generic_to_shared(tile) & 0x3ffff) >> 4 | 8ull << 16 | 16ull << 32;
  unsigned long long b = a + 128;
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  asm volatile("wgmma.fence.sync.aligned;\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n"
               "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b)
               : "memory");
  return d[0] + d[1] + d[2] + d[3];
}

extern "C" __global__ void leak(const float *secret, float *out) {
  float x = first_of_product(secret);
  if (x > 0.f) {
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      x = x * x + 0.5f;
  }
  out[threadIdx.x] = x;
}

extern "C" __global__ void clean(const float *secret, float *out) {
  out[threadIdx.x] = fmaxf(first_of_product(secret), 0.f);
}
