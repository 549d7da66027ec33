/*
 * delta.cu - of each query row, what its gradients need besides the tensors: delta = rowsum(grad_out * out) - grad_lse,
 * and lse in base 2; and where dq is added up in integers, the unit of each row (units.cuh).
 *
 * A row is read by LANES lanes, eight elements each, and a warp reads 32 / LANES rows at a time. Each lane adds up its
 * eight products in order, then the lanes' sums meet in a tree of shuffles: the order of a row's sum is fixed.
 *
 * An lse that is not finite becomes NaN. Of a row that sees a key it says that a score was +inf or NaN, or every one
 * -inf: softmax of that row is NaN, and so are the gradients. Of a row that sees none, no probability is looked at.
 *
 * CT: out, grad_out, lse, grad_lse and the bounds of k and v only ever meet conversions, multiplications, additions,
 * maxima, the logarithm and selects of ct.h, masks and selects that are public, and shuffles with constant lanes.
 * Addresses and predicates are functions of the thread, the block index and the parameters.
 */
#include "../../hopper/ptx.cuh"
#include "params.h"
#include "units.cuh"

enum {
  EIGHT = 8,                /* elements of 16 bytes */
  LANES = HEAD_DIM / EIGHT, /* that share a row */
  WARPS = WARPGROUPS * 4,
  WARP_ROWS = ROWS / WARPS, /* rows that a warp computes */
  AT_A_TIME = 32 / LANES,
  TURNS = WARP_ROWS / AT_A_TIME,
  WITH_UNITS = HEAD_DIM <= 128 /* one_pass.cu serves no more */
};

static_assert(32 % LANES == 0 && ROWS % WARPS == 0 && WARP_ROWS % AT_A_TIME == 0, "rows share out evenly");

/* Eight elements from 16 bytes. */
static __device__ __forceinline__ void widen(float *x, uint4 packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    unpack_two(&x[2 * i], &x[2 * i + 1], words[i]);
}

/* Over the lanes that share a row, in a tree. */
static __device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int step = 1; step < LANES; step *= 2)
    sum += __shfl_xor_sync(FULL_MASK, sum, step);
  return sum;
}

/* The row's largest |element|; eight are this lane's. */
static __device__ __forceinline__ float largest_of_lanes(uint4 eight) {
  uint32_t largest = largest_of_eight(eight);
#pragma unroll
  for (int step = 1; step < LANES; step *= 2)
    largest = larger_halves(largest, __shfl_xor_sync(FULL_MASK, largest, step));
  float low, high;
  unpack_two(&low, &high, largest);
  return low;
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, CTAS_PER_SM)
dhp_attention_delta(const __grid_constant__ dhp_delta_params p) {
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int head_of_all = (int)blockIdx.x / p.tiles, tile = (int)blockIdx.x - head_of_all * p.tiles;
  const int batch = head_of_all / p.heads, head = head_of_all - batch * p.heads;
  const int column = lane % LANES * EIGHT;
  const uint32_t inside = column < p.head_dim ? ~0u : 0;
  const int readable = inside ? column : 0;
  const char *const out = (const char *)p.out + 2 * (batch * p.out_stride[0] + head * p.out_stride[1] + readable);
  const char *const grad_out =
      (const char *)p.grad_out + 2 * (batch * p.grad_out_stride[0] + head * p.grad_out_stride[1] + readable);
  const int64_t first_of_head = (int64_t)head_of_all * p.seqlen_q;
  float *const statistics = p.statistics + (int64_t)head_of_all * p.pairs * 4;
  await_launches_before();
  begin_launches_after();

  uint4 out_eight[TURNS], grad_eight[TURNS];
  float lse[TURNS], grad_lse[TURNS];
  int row[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    row[turn] = tile * ROWS + warp * WARP_ROWS + turn * AT_A_TIME + lane / LANES;
    const int64_t there = min(row[turn], p.seqlen_q - 1);
    out_eight[turn] = masked(*(const uint4 *)(out + 2 * there * p.out_stride[2]), inside);
    grad_eight[turn] = masked(*(const uint4 *)(grad_out + 2 * there * p.grad_out_stride[2]), inside);
    lse[turn] = p.lse[first_of_head + there];
    grad_lse[turn] = __uint_as_float(__float_as_uint(p.grad_lse[first_of_head + there]) & p.has_grad_lse);
  }
  /* In the end a lane has the row of the turn with its number, or of the last one. */
  const int turn_here = min(lane % LANES, TURNS - 1);
  const int row_here = tile * ROWS + warp * WARP_ROWS + turn_here * AT_A_TIME + lane / LANES;
  float norm_here = 0.f, delta_here = 0.f, lse_here = 0.f;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    float a[EIGHT], b[EIGHT], sum = 0.f;
    widen(a, out_eight[turn]);
    widen(b, grad_eight[turn]);
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      sum = fmaf(a[i], b[i], sum);
    sum = sum_of_lanes(sum);
    const float log2_e = 1.44269504f;
    const float in_base_2 = fmaf(lse[turn], log2_e, lse[turn] * 0.f), delta = sum - grad_lse[turn];
    const int exists = row[turn] < p.seqlen_q, go = lane % LANES == 0 && row[turn] < 2 * p.pairs;
    float *const to = statistics + (int64_t)(row[turn] / 2) * 4 + row[turn] % 2;
    store_one(go, to, exists ? in_base_2 : 0.f);
    store_one(go, to + 2, exists ? delta : 0.f);
    if (WITH_UNITS) {
      const float power = power_for(largest_of_lanes(grad_eight[turn]));
      const float norm = log2_norm(sum_of_lanes(squares_of_eight(b, power)), power);
      norm_here = turn == turn_here ? norm : norm_here;
      delta_here = turn == turn_here ? delta : delta_here;
      lse_here = turn == turn_here ? in_base_2 : lse_here;
    }
  }
  if (WITH_UNITS) {
    const int last = max(last_key_seen(row_here, p.causal_offset, p.seqlen_k), -1);
    const int common = max(last_key_seen(tile * ROWS, p.causal_offset, p.seqlen_k), -1);
    const float2 keys = bounds_up_to(&p, head_of_all / p.heads_per_key_head, max(common, 0), max(last, 0), lane);
    const uint32_t unit = last >= 0 ? unit_of(norm_here, delta_here, lse_here, keys) : (uint32_t)ONE_UNIT;
    store_byte(p.blocks > 0 && lane % LANES < TURNS && row_here < p.seqlen_q,
               p.units + (int64_t)head_of_all * p.seqlen_q + row_here, unit);
    clear_sums(&p, head_of_all, tile);
  }
  end_together();
}
