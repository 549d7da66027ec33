/*
 * attention_bwd.cu - FlashAttention backward for Hopper: P and dS are computed again from the lse of each query row.
 *
 *     P = exp(scale q k^T - lse),  dP = grad_out v^T,  dS = P * (dP - delta),
 *     dv = P^T grad_out,  dk = scale dS^T q,  dq = scale dS k
 *
 * A CTA owns rows and walks the other side, see walk.cuh. With OWNS_KEYS it owns keys, everything is transposed, and it
 * computes dk (WITH_DS), dv (WITH_P) or both; without, it owns queries and computes dq. So no sum crosses CTAs, and its
 * order is fixed: no atomics, no semaphores.
 *
 * Path of the data: each warpgroup has ROWS owned rows in shared memory for good. In a step it issues, with a walked
 * tile,
 *
 *     S = own_s walk_s^T  and  dP = own_dp walk_dp^T     from shared memory,
 *     P walk_dp  and  dS walk_s                          added to the gradients, P and dS packed in registers,
 *
 * and computes P while the tensor cores are at dP, and dS while they are at P walk_dp. Own_s, own_dp are k, v and
 * walk_s, walk_dp are q, grad_out; or the other way round.
 *
 * In each step the first warps of the last warpgroup ask TMA for the tile that comes a few steps later, into a stage
 * that all warpgroups have finished. Where shared memory has no room for two stages of both tensors, walk_dp, which
 * only dP reads, has one place (DP_ALONE), which is loaded again as soon as dP is there.
 *
 * CT: as in attention_fwd.cu. q, k, v, grad_out, and what delta made of out, lse and grad_lse only ever meet wgmma,
 * fused multiply-adds, multiplications, additions, ex2, selects by public positions, and conversions.
 */
#include <cuda.h>

#include "../../hopper/turns.cuh"
#include "layout.cuh"
#include "loads.cuh"
#include "wgmma.h"
/* These use the constants and products above. */
#include "scores.cuh"
#include "gradients_out.cuh"

/* More named barriers, where the one place of dP's tiles changes hands. */
enum meeting {
  DP_FREE = LOADED + STAGES, /* all have dP of this step */
  DP_ASKED,                  /* the next one was asked for */
  AWAKE                      /* the last warpgroup has the first two tiles */
};

static_assert(AWAKE < 16, "there are 16 named barriers");

extern "C" __global__ void __launch_bounds__(CTA_THREADS, CTAS_PER_SM)
dhp_attention_bwd(const __grid_constant__ CUtensorMap own_s_map, const __grid_constant__ CUtensorMap own_dp_map,
                  const __grid_constant__ CUtensorMap walk_s_map, const __grid_constant__ CUtensorMap walk_dp_map,
                  const __grid_constant__ CUtensorMap statistics_map, const __grid_constant__ dhp_bwd_params p) {
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + DHP_BWD_ALIGN - 1) & ~(uint32_t)(DHP_BWD_ALIGN - 1);
  const int warp = warp_index();
  const int group = warp / WARPS_PER_GROUP, lane = (int)threadIdx.x % 32;
  const int is_last_group = group == WARPGROUPS - 1;
  const uint32_t stages_full = base + SHARED_BARRIERS + STAGE_FULL, dp_full = base + SHARED_BARRIERS + DP_FULL;
  /* leading bytes unused: K-major, one box a product */
  const uint32_t own_s = matrix_descriptor(base + SHARED_OWN_S + group * OWN_BYTES, 16);
  const uint32_t own_dp = matrix_descriptor(base + SHARED_OWN_DP + group * OWN_BYTES, 16);
  /* the walked tiles as rows of S and dP, and as columns of the sums */
  const uint32_t walk_s = matrix_descriptor(base + SHARED_WALK_S, 16);
  const uint32_t walk_dp = matrix_descriptor(base + SHARED_WALK_DP, 16);
  const uint32_t sum_s = matrix_descriptor(base + SHARED_WALK_S, WALK_BOX_BYTES);
  const uint32_t sum_dp = matrix_descriptor(base + SHARED_WALK_DP, WALK_BOX_BYTES);

  const walk w = walk_of(&p, (int)blockIdx.x);
  make_barriers(warp, base, &own_s_map, &walk_s_map, &walk_dp_map);

  /* First loads. */
  const int steps = w.heads * w.tiles;
  const loader load = loader_of(warp, &own_s_map, &own_dp_map, &walk_s_map, &walk_dp_map, base);
  place next = {0, 0}; /* the first that was not asked for */
  await_launches_before();
  begin_launches_after();
  load_first(steps > 0, &load, &statistics_map, base, &w, p.heads);
#pragma unroll
  for (int u = 1; u < STAGES - 1 - SPARE; u++) {
    next = place_after(&w, next);
    load_tile(u < steps, &load, &statistics_map, base, u, &w, next, p.heads, 0);
  }
  next = place_after(&w, next);

  float from_ds[OUTPUTS], from_p[OUTPUTS];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    from_ds[i] = from_p[i] = 0.f;

  /* Of this thread's two owned rows: where they are, and the last key seen, or what has to be said of queries. */
  int row[2], edge[2];
  of_queries queries;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row[r] = w.own_row + group * ROWS + warp % WARPS_PER_GROUP * 16 + lane / 4 + 8 * r;
    if (OWNS_KEYS) {
      edge[r] = row[r] - p.causal_offset; /* the first query that sees the key */
    } else {
      edge[r] = p.is_causal ? min(row[r] + p.causal_offset, p.seqlen_k - 1) : p.seqlen_k - 1; /* the last key seen */
      const int there = min(row[r], p.seqlen_q - 1);
      const float *const of_row =
          p.statistics + ((int64_t)(w.batch * p.heads + w.own_head) * p.pairs + there / 2) * 4 + there % 2;
      queries.lse[r] = of_row[0];
      queries.delta[r] = of_row[2];
    }
  }

  /* Of the walked queries, those of this thread's columns. */
  const uint32_t statistics = base + SHARED_STATISTICS + lane % 4 * STATISTICS_OF_PAIR;

  stage at = {0, 0};
  place now = {0, 0};
  const uint32_t first = PHASE(steps <= 0); /* nothing to come: the phase before */
  uint32_t arrived = mbarrier_wait_first(stages_full, first, p.zero);
  if (DP_ALONE) arrived &= mbarrier_wait_first(dp_full, first, p.zero);

#define OF_STAGE(descriptor) ((descriptor) + at.index * (WALK_BYTES / DESCRIPTOR_UNIT))
/* S and dP; dP's tile, if it has a place of its own, is awaited while the tensor cores are at S. */
#define ISSUE_SCORES()                                                             \
  do {                                                                             \
    issue_scores(s, own_s, OF_STAGE(walk_s));                                      \
    if (DP_ALONE) {                                                                \
      bar_sync(!is_last_group && done > 0, DP_ASKED, CTA_THREADS);                 \
      arrived &= mbarrier_wait_steady(dp_full, PHASE(done & 1), p.zero);           \
    }                                                                              \
    if (WITH_DS) issue_scores(dp, own_dp, DP_ALONE ? walk_dp : OF_STAGE(walk_dp)); \
  } while (0)

/*
 * S had come, so this warpgroup has finished the step before. The last one waits until all have finished the step
 * before that, if there are stages enough, so that they need not go in step; then that stage is loaded again.
 * Before they wait for what was asked for, the others meet the last one. By then it has long been there, unless a wait
 * was in vain, or long: without this meeting, a warp that has waited in vain would run ahead of the barriers, and one
 * that waits could give up before the last one, which sleeps as long, has asked. So could a warp of the last one; its
 * warps meet before they ask.
 */
#define FREE_STAGE_AND_LOAD()                                                                             \
  do {                                                                                                    \
    const int before = index_before(at.index), freed = SPARE ? index_before(before) : before;             \
    bar_arrive(!is_last_group && (!SPARE || done + 1 < steps), FINISHED + at.index, CTA_THREADS);         \
    bar_sync(is_last_group && (!SPARE || done > 0), FINISHED + (SPARE ? before : at.index), CTA_THREADS); \
    bar_sync(SPARE && is_last_group && done == 0, AWAKE, WARPGROUP_THREADS);                              \
    const int wanted = next.head < w.heads && arrived && !load.alone;                                     \
    load_tile(wanted, &load, &statistics_map, base, freed, &w, next, p.heads, 0);                         \
    bar_arrive(is_last_group && next.head < w.heads, LOADED + freed, CTA_THREADS);                        \
    if (!DP_ALONE) next = place_after(&w, next);                                                          \
  } while (0)

/* The same for dP's one place, once all have dP. */
#define LOAD_DP()                                                             \
  do {                                                                        \
    bar_arrive(!is_last_group && done + 1 < steps, DP_FREE, CTA_THREADS);     \
    bar_sync(is_last_group && done + 1 < steps, DP_FREE, CTA_THREADS);        \
    const int wanted = next.head < w.heads && arrived && load.alone;          \
    load_tile(wanted, &load, &statistics_map, base, 0, &w, next, p.heads, 0); \
    bar_arrive(is_last_group && done + 1 < steps, DP_ASKED, CTA_THREADS);     \
    next = place_after(&w, next);                                             \
  } while (0)

/* The next step's tile, while the tensor cores have work. After the last step: the phase before, which has come. */
#define AWAIT_NEXT()                                                                                                   \
  do {                                                                                                                 \
    const stage after = stage_after(at);                                                                               \
    const uint32_t phase = after.phase ^ PHASE(done + 1 == steps);                                                     \
    bar_sync(!is_last_group && done + 1 < steps && done + 1 >= STAGES - 1 - SPARE, LOADED + after.index, CTA_THREADS); \
    arrived &= mbarrier_wait_steady(stages_full + 8 * after.index, phase, p.zero);                                     \
  } while (0)

/* A step, with the mask or without. Without a stage to spare, a tile is asked for as early as possible, and awaited
 * last. */
#define RUN_STEP(masked)                                                             \
  do {                                                                               \
    float s[SCORES], dp[SCORES];                                                     \
    uint32_t packed_p[SCORES / 2], packed_ds[SCORES / 2];                            \
    ISSUE_SCORES();                                                                  \
    wgmma_wait(WITH_DS);                                                             \
    if (!SPARE) FREE_STAGE_AND_LOAD();                                               \
    int limit[2];                                                                    \
    for (int r = 0; r < 2; r++)                                                      \
      limit[r] = edge[r] - first_row(&w, now) - lane % 4 * 2;                        \
    queries.walked = statistics + at.index * STATISTICS_BYTES;                       \
    probabilities(s, &queries, p.scale_log2, limit, masked);                         \
    if (WITH_P) {                                                                    \
      pack(packed_p, s);                                                             \
      wgmma_fence();                                                                 \
      issue_registers<wgmma_gradient>(from_p, packed_p, OF_STAGE(sum_dp), WALK, 1);  \
    }                                                                                \
    if (SPARE) {                                                                     \
      AWAIT_NEXT();                                                                  \
      FREE_STAGE_AND_LOAD();                                                         \
    }                                                                                \
    if (WITH_DS) {                                                                   \
      wgmma_wait(WITH_P);                                                            \
      score_gradients(packed_ds, s, dp, &queries, limit, masked);                    \
      wgmma_fence();                                                                 \
      issue_registers<wgmma_gradient>(from_ds, packed_ds, OF_STAGE(sum_s), WALK, 1); \
      if (DP_ALONE) LOAD_DP();                                                       \
    }                                                                                \
    if (!SPARE) AWAIT_NEXT();                                                        \
    at = stage_after(at);                                                            \
    now.tile++;                                                                      \
    done++;                                                                          \
  } while (0)

  int done = 0;
#pragma unroll 1
  while (done < steps) {
    now.tile = 0;
#pragma unroll 1
    while (now.tile < w.masked)
      RUN_STEP(1);
#pragma unroll 1
    while (now.tile < w.tiles)
      RUN_STEP(0);
  }

  wgmma_wait(0);
  const float poison = arrived ? 0.f : NAN;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int columns = row[r] < p.own_rows ? p.head_dim : 0;
    if (WITH_DS) store_gradient(p.from_ds, p.from_ds_stride, &w, row[r], from_ds, r, p.scale + poison, columns, lane);
    if (WITH_P) store_gradient(p.from_p, p.from_p_stride, &w, row[r], from_p, r, 1.f + poison, columns, lane);
  }
  end_together();
}
