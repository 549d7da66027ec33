/*
 * logsumexp.cu - ln(sum(exp(row))) of each row, one thread a row, as one would write it first.
 *
 * docs/audit-your-kernel.md audits it. The rows are secret.
 */
extern "C" __global__ void logsumexp(float *out, const float *rows, int count, int length) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= count) return;
  float top = -INFINITY, sum = 0.f;
  for (int i = 0; i < length; i++) {
    const float x = rows[(long long)row * length + i];
    if (x > top) { /* a new maximum: what was summed so far counts less */
      sum *= expf(top - x);
      top = x;
    }
    sum += expf(x - top);
  }
  out[row] = top + logf(sum);
}
