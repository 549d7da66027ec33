/*
 * dealing.cpp - which query tiles the CTAs of a launch compute: nth_query_tile of the forward family, compiled for the
 * host with the constants of one kernel, asked for every query tile of every CTA.
 *
 * Reads calls from standard input, a line each: B Hq Hk Sq Sk D is_causal causal_offset. Of those that the plan gives
 * to this kernel (float16), every query tile has to be computed once, and its numbers of key tiles have to be right.
 * Prints a line for each: how busy the CTAs are kept, 1 if all are equally long. Status 1 and a sentence at the first
 * violation.
 */
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "model.h"

#include "attention_fwd.cu"

extern "C" {
#include "../../../csrc/families/forward/schedule.h"
}

Index blockIdx, gridDim;
char shared[1]; /* the kernel itself never runs */

struct Call {
  long long batch, heads, key_heads, seqlen_q, seqlen_k, head_dim, is_causal, offset;
};

static void require(bool holds, const char *what, const Call &c) {
  if (holds) return;
  printf("violation: %s; call %lld %lld %lld %lld %lld %lld %lld %lld, CTA %u of %u\n", what, c.batch, c.heads,
         c.key_heads, c.seqlen_q, c.seqlen_k, c.head_dim, c.is_causal, c.offset, blockIdx.x, gridDim.x);
  exit(1);
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static dhp_tensor tensor(long long batch, long long heads, long long rows, long long columns) {
  return {nullptr, {batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}, DHP_FLOAT16};
}

/* The query tiles of all CTAs, checked; resteps how busy they are kept. */
static double check(const Call &c, const dhp_plan &plan, const dhp_fwd_params &p) {
  const int rows_a_tile = plan.kernel->tile_q / plan.heads_per_tile;
  std::vector<char> computed((size_t)(c.batch * p.head_groups * plan.q_tiles));
  double longest = 0., all = 0.;
  gridDim.x = (unsigned)plan.grid;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    double steps = 0.;
    query_tile w = nth_query_tile(&p, 0);
    require(w.key_tiles > 0, "a CTA without work", c);
    for (int nth = 1; w.key_tiles > 0; w = nth_query_tile(&p, nth++)) {
      const int64_t group = w.head / plan.heads_per_tile, tile = w.row / rows_a_tile;
      require(w.batch >= 0 && w.batch < c.batch && group >= 0 && group < p.head_groups && tile >= 0 &&
                  tile < plan.q_tiles,
              "a query tile that there is not", c);
      require(w.head % plan.heads_per_tile == 0 && w.row % rows_a_tile == 0, "a query tile that begins in between", c);
      require(w.key_head == w.head / p.heads_per_key_head, "another key head", c);
      char &count = computed[(size_t)((w.batch * p.head_groups + group) * plan.q_tiles + tile)];
      require(count++ == 0, "a query tile is computed twice", c);
      const int64_t seen_by_first =
          c.is_causal ? std::min<int64_t>(p.seqlen_k, w.row + 1 + p.causal_offset) : p.seqlen_k;
      const int64_t seen_by_last =
          c.is_causal ? std::min<int64_t>(p.seqlen_k, w.row + rows_a_tile + p.causal_offset) : p.seqlen_k;
      require(w.key_tiles == std::max<int64_t>(seen_by_last <= 0 ? 1 : ceil_div(seen_by_last, TILE_K), 1),
              "the wrong number of key tiles", c);
      require(w.masked == w.key_tiles - std::max<int64_t>(seen_by_first, 0) / TILE_K,
              "the wrong number of key tiles under the mask", c);
      steps += w.key_tiles + 1.;
    }
    longest = std::max(longest, steps);
    all += steps;
  }
  require(std::all_of(computed.begin(), computed.end(), [](char count) { return count == 1; }),
          "a query tile is left out", c);
  return all / (longest * (double)plan.grid);
}

int main() {
  Call c;
  while (scanf("%lld %lld %lld %lld %lld %lld %lld %lld", &c.batch, &c.heads, &c.key_heads, &c.seqlen_q, &c.seqlen_k,
               &c.head_dim, &c.is_causal, &c.offset) == 8) {
    dhp_attention args = {};
    args.q = args.out = tensor(c.batch, c.heads, c.seqlen_q, c.head_dim);
    args.k = args.v = tensor(c.batch, c.key_heads, c.seqlen_k, c.head_dim);
    args.scale = 1.f;
    args.is_causal = c.is_causal != 0;
    args.causal_offset = c.offset;
    dhp_plan plan;
    dhp_error error;
    if (dhp_plan_attention(&args, &plan, &error) != DHP_OK) {
      printf("violation: %s\n", error.text);
      return 1;
    }
    const dhp_kernel_info *const k = plan.kernel;
    if (k->head_dim != HEAD_DIM || k->warpgroups != WARPGROUPS || k->tile_q != WARPGROUPS * ROWS) continue;
    dhp_fwd_params p = {};
    p.batch = (int32_t)c.batch;
    p.heads_per_key_head = (int32_t)(c.heads / c.key_heads);
    const int64_t offset = std::min(std::max<int64_t>(c.offset, -c.seqlen_q), (int64_t)c.seqlen_k);
    p.is_causal = args.is_causal;
    p.causal_offset = (int32_t)offset;
    p.seqlen_k =
        (int32_t)std::max<int64_t>(c.is_causal ? std::min<int64_t>(c.seqlen_k, c.seqlen_q + offset) : c.seqlen_k, 0);
    while (plan.heads_per_tile << p.log2_rows < ROWS)
      p.log2_rows++;
    dhp_set_schedule(&p, &args, &plan);
    printf("%lld %lld %lld %lld %lld %lld %lld %lld: %.4f\n", c.batch, c.heads, c.key_heads, c.seqlen_q, c.seqlen_k,
           c.head_dim, c.is_causal, c.offset, check(c, plan, p));
  }
  return 0;
}
