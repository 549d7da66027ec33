// control: expects sass=address counters=caught bitwise=blind timing=may
// A value chooses how far apart the lanes of one warp store, once among 256 stores: a few sectors more, below what the
// counter of all sectors that are written may vary by. Only the counter of sectors of global stores shows them.

const int PLAIN = 8192; // floats of out that are stored plainly; behind them is room for the lanes apart

__device__ void store(const float *secret, float *out, int stride) {
  float x = secret[threadIdx.x];
#pragma unroll
  for (int i = 0; i < PLAIN; i += 128)
    out[i + threadIdx.x] = x;
  int apart = threadIdx.x < 32 ? stride : 1; // the other warps store side by side
  out[PLAIN + threadIdx.x * apart + (threadIdx.x & ~31)] = x;
}

extern "C" __global__ void leak(const float *secret, float *out) { store(secret, out, 1 + (secret[0] > 0.f)); }

extern "C" __global__ void clean(const float *secret, float *out) { store(secret, out, 2); }
