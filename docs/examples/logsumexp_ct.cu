/*
 * logsumexp_ct.cu - ln(sum(exp(row))) of each row, one thread a row, with nothing that depends on the values.
 *
 * docs/audit-your-kernel.md shows the way here from logsumexp.cu. The rows are secret, their number and length are not.
 */

/* One instruction each, without the fix-ups for subnormals that exp2f and log2f have (PTX ISA, ex2.approx, lg2.approx). */
static __device__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

static __device__ float log2_flushed(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

extern "C" __global__ void logsumexp(float *out, const float *rows, int count, int length) {
  const float log2_e = 1.44269504f, ln_2 = 0.69314718f;
  const int row = min((int)(blockIdx.x * blockDim.x + threadIdx.x), count - 1); /* spare threads repeat the last row */
  float top = -INFINITY, sum = 0.f;
  for (int i = 0; i < length; i++) {
    const float x = rows[(long long)row * length + i];
    const float next = fmaxf(top, x);
    sum = sum * exp2_flushed((top - next) * log2_e) + exp2_flushed((x - next) * log2_e);
    top = next;
  }
  out[row] = top + log2_flushed(sum) * ln_2;
}
