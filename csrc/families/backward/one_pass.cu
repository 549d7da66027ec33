/*
 * one_pass.cu - FlashAttention backward for Hopper with S and dP computed once: dk and dv as in attention_bwd.cu, and
 * dq besides.
 *
 * A CTA owns 128 keys, 64 for each of two warpgroups, and walks the queries that see them, see walk.cuh. In a step a
 * warpgroup issues, with a tile of queries,
 *
 *     S = k q^T  and  dP = v grad_out^T     from shared memory; P and dS take their places in registers,
 *     dv += P grad_out,  dk += dS q         P and dS packed in registers,
 *     dq = dS k                             from shared memory, of the step before, with the other warpgroup's dS, too.
 *
 * Dq is a step behind so that the warpgroups need not go in step: while one computes P and dS, the tensor cores work
 * for the other. A share of dq goes out as integers that are added up in global memory (dq_sums.cuh); dq_out makes dq
 * of the sums. So no bit depends on which CTA comes first.
 *
 * What waits for something slow is spread over the step: a share is written to shared memory in one step and leaves in
 * the next; the barrier of the next tile is tried once here and once there; statistics of the queries are read ahead.
 *
 * CT: as in attention_bwd.cu; shares of dq also meet conversions to integers, which saturate and do not branch, and
 * are added up in memory as integers, at addresses that are public.
 */
#include <cuda.h>

#include "../../hopper/turns.cuh"
#include "layout.cuh"
#include "loads.cuh"
#include "wgmma.h"
/* These use the constants and products above. */
#include "scores.cuh"
#include "gradients_out.cuh"
#include "dq_sums.cuh"

/* A named barrier where one warpgroup arrives and the other waits. A step's parity tells it from the step before. */
enum meeting {
  READ = 1,             /* + warpgroup + 2 parity of a step: it has read the dS of that step */
  WRITTEN = READ + 4,   /* + the same: it has written its part of it */
  USED = WRITTEN + 4,   /* + stage of step t: the first warpgroup has finished step t-1 */
  BEGUN = USED + STAGES /* the first warpgroup is at its first scores */
};

static_assert(WARPGROUPS == 2 && BEGUN < 16, "two warpgroups exchange dS; there are 16 named barriers");

extern "C" __global__ void __launch_bounds__(CTA_THREADS, CTAS_PER_SM)
dhp_attention_bwd(const __grid_constant__ CUtensorMap own_s_map, const __grid_constant__ CUtensorMap own_dp_map,
                  const __grid_constant__ CUtensorMap walk_s_map, const __grid_constant__ CUtensorMap walk_dp_map,
                  const __grid_constant__ CUtensorMap statistics_map, const __grid_constant__ dhp_bwd_params p) {
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + DHP_BWD_ALIGN - 1) & ~(uint32_t)(DHP_BWD_ALIGN - 1);
  const int warp = warp_index();
  const int group = warp / WARPS_PER_GROUP, warp_of_group = warp & (WARPS_PER_GROUP - 1),
            lane = (int)(threadIdx.x & 31);
  const int is_last_group = group == WARPGROUPS - 1, other = group ^ 1;
  const uint32_t stages_full = base + SHARED_BARRIERS + STAGE_FULL;
  /* leading bytes unused: K-major, one box a product */
  const uint32_t own_s = matrix_descriptor(base + SHARED_OWN_S + group * OWN_BYTES, 16);
  const uint32_t own_dp = matrix_descriptor(base + SHARED_OWN_DP + group * OWN_BYTES, 16);
  /* the walked tiles as rows of S and dP, and as columns of the sums */
  const uint32_t walk_s = matrix_descriptor(base + SHARED_WALK_S, 16);
  const uint32_t walk_dp = matrix_descriptor(base + SHARED_WALK_DP, 16);
  const uint32_t sum_s = matrix_descriptor(base + SHARED_WALK_S, WALK_BOX_BYTES);
  const uint32_t sum_dp = matrix_descriptor(base + SHARED_WALK_DP, WALK_BOX_BYTES);
  /* this warpgroup's part of dq: 64 rows of dS, 64 columns of k */
  const uint32_t dq_ds = matrix_descriptor(base + SHARED_DS + SPLITS_ROWS * group * 64 * ROW_BYTES, 16);
  const uint32_t dq_k = matrix_descriptor(base + SHARED_OWN_S + (SPLITS_ROWS ? 0 : group * OWN_BOX_BYTES), 16);
  const uint32_t ds_out = base + SHARED_DS + group * WALK * ROW_BYTES;
  const uint32_t share_out = base + SHARED_SHARES + warp * BLOCK_BYTES;

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
  for (int u = 1; u < STAGES - 1; u++) {
    next = place_after(&w, next);
    load_tile(u < steps, &load, &statistics_map, base, u, &w, next, p.heads, 0);
  }
  next = place_after(&w, next);

  float dk[OUTPUTS], dv[OUTPUTS];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    dk[i] = dv[i] = 0.f;

  /*
   * This thread's keys, and of each the first query that sees it. Keys past the end are seen by none: they would not
   * give zeros to dq, because their scores are 0, and exp(0 - lse) need not be finite.
   */
  int row[2], edge[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row[r] = w.own_row + group * ROWS + warp_of_group * 16 + lane / 4 + 8 * r;
    edge[r] = row[r] < p.seqlen_k ? row[r] - p.causal_offset : p.seqlen_q + WALK;
    edge[r] = row[r] < p.seqlen_k && !p.is_causal ? 0 : edge[r];
  }
  const int masked_tiles = w.own_row + WARPGROUPS * ROWS > p.seqlen_k ? w.tiles : w.masked;

  stage at = {0, 0};
  place now = {0, 0};
  int done = 0;
  uint32_t arrived =
      mbarrier_wait_first(stages_full, PHASE(steps <= 0), p.zero); /* nothing to come: the phase before */
  const uint32_t nap = is_last_group ? NAP : LONG_NAP;

  /* Of the walked queries, those of this thread's columns. */
  const uint32_t statistics = base + SHARED_STATISTICS + lane % 4 * STATISTICS_OF_PAIR;
  float2 lse[PAIRS], delta[AHEAD];
  const of_queries unread = {.walked = 0, .lse_ahead = lse, .delta_ahead = delta};
  of_queries queries = unread;
  load_statistics(lse, statistics, LSE, PAIRS);
  if (READS_AHEAD) load_statistics(delta, statistics, DELTA, AHEAD);

  /* The share of dq of the step before, with the units of this thread's rows, and the one before that. */
  share last = {w.head, 0, 0}, sent = last;
  float unit[2] = {0.f, 0.f};

#define OF_STAGE(descriptor) ((descriptor) + at.index * (WALK_BYTES / DESCRIPTOR_UNIT))
#define DS_OF(step) (((step) & 1) * (DS_BYTES / DESCRIPTOR_UNIT))

/* The first warpgroup is ahead: when it has finished the step before, and so has the last one, that stage is loaded
 * again. */
#define LOAD_NEXT()                                                                                \
  do {                                                                                             \
    bar_sync(is_last_group && done > 0, USED + at.index, CTA_THREADS);                             \
    const int wanted = next.head < w.heads && arrived;                                             \
    load_tile(wanted, &load, &statistics_map, base, index_before(at.index), &w, next, p.heads, 0); \
    next = place_after(&w, next);                                                                  \
  } while (0)

/* S and dP. */
#define ISSUE_SCORES()                           \
  do {                                           \
    issue_scores(s, own_s, OF_STAGE(walk_s));    \
    issue_scores(dp, own_dp, OF_STAGE(walk_dp)); \
  } while (0)

/* Dq of the step before, once the other warpgroup has written its part of that dS. */
#define ISSUE_DQ(go)                                                       \
  do {                                                                     \
    bar_sync(go, WRITTEN + other + 2 * (done + 1 & 1), CTA_THREADS);       \
    issue_dq<wgmma_dq_fresh, wgmma_dq>(dq, dq_ds + DS_OF(done + 1), dq_k); \
  } while (0)

/* The share of two steps ago, which was written to shared memory at the end of the last one. */
#define SEND_SHARE() send_share(sent.exists, sums_of(&p, w.batch, &sent, group), share_out)

/*
 * The next tile's barrier, once more; what was said before is `known` then. After the last step: the phase before,
 * which has come. The other warpgroup may wait for a tile that the last one is late to ask for: it naps for longer. The
 * warps of the last one have met in this step, or at its beginning, so none of them waits for what another one has yet
 * to ask for.
 */
#define TRY_NEXT() known = there, there = mbarrier_try(stages_full + 8 * after.index, phase, p.zero, there)
#define NAP_AND_TRY_NEXT() \
  known = there, there = mbarrier_nap_and_try(stages_full + 8 * after.index, phase, p.zero, there, nap)

/* The second warpgroup begins later than the first, by the time until here: at the same time they would compute at the
 * same time, and the tensor cores would have nothing to do. */
#define LET_SECOND_BEGIN() bar_arrive(!is_last_group && done == 0, BEGUN, CTA_THREADS)

/* A step, with the mask or without. */
#define RUN_STEP(masked)                                                                                     \
  do {                                                                                                       \
    float s[SCORES], dp[SCORES], dq[DQ_FLOATS];                                                              \
    uint32_t packed_p[SCORES / 2], packed_ds[SCORES / 2];                                                    \
    ISSUE_SCORES();                                                                                          \
    LET_SECOND_BEGIN();                                                                                      \
    if (!SPARE) SEND_SHARE();                                                                                \
    int limit[2];                                                                                            \
    for (int r = 0; r < 2; r++)                                                                              \
      limit[r] = edge[r] - first_row(&w, now) - lane % 4 * 2;                                                \
    queries.walked = statistics + at.index * STATISTICS_BYTES;                                               \
    wgmma_wait(1);                                                                                           \
    probabilities(s, &queries, p.scale_log2, limit, masked);                                                 \
    if (!READS_AHEAD) load_statistics(delta, queries.walked, DELTA, AHEAD);                                  \
    pack(packed_p, s);                                                                                       \
    if (!SPARE) LOAD_NEXT();                                                                                 \
    if (SPARE) SEND_SHARE();                                                                                 \
    wgmma_wait(0);                                                                                           \
    score_gradients(packed_ds, s, dp, &queries, limit, masked);                                              \
    bar_sync(done > 1, READ + other + 2 * (done & 1), CTA_THREADS);                                          \
    store_score_gradients(ds_out + (done & 1) * DS_BYTES, packed_ds, lane, warp_of_group);                   \
    wgmma_fence();                                                                                           \
    issue_registers<wgmma_gradient>(dv, packed_p, OF_STAGE(sum_dp), WALK, 1);                                \
    ISSUE_DQ(done > 0);                                                                                      \
    issue_registers<wgmma_gradient>(dk, packed_ds, OF_STAGE(sum_s), WALK, 1);                                \
    if (SPARE) LOAD_NEXT();                                                                                  \
                                                                                                             \
    const stage after = stage_after(at);                                                                     \
    const uint32_t phase = after.phase ^ PHASE(done + 1 == steps);                                           \
    uint32_t there = 0, known = 0;                                                                           \
    if (SPARE) TRY_NEXT();                                                                                   \
    fence_async_shared();                                                                                    \
    bar_arrive(1, WRITTEN + group + 2 * (done & 1), CTA_THREADS);                                            \
    if (SPARE) NAP_AND_TRY_NEXT();                                                                           \
    bulk_wait_read();                                                                                        \
    __syncwarp();                                                                                            \
    wgmma_wait(1);                                                                                           \
    if (SPARE) TRY_NEXT();                                                                                   \
    bar_arrive(done > 0 && done + 1 < steps, READ + group + 2 * (done + 1 & 1), CTA_THREADS);                \
    if (!ELEMENT_IS_BFLOAT16) mark_rows(&p, &w, &last, dq, warp, lane);                                      \
    store_share(share_out + lane * 16, dq, unit, 0);                                                         \
    TRY_NEXT();                                                                                              \
    store_share(share_out + lane * 16, dq, unit, DQ_FLOATS / 2);                                             \
    TRY_NEXT();                                                                                              \
    sent = last;                                                                                             \
    last.head = w.head + now.head;                                                                           \
    last.block = first_row(&w, now) / DQ_BLOCK_ROWS + SPLITS_ROWS * group * WARPS_PER_GROUP + warp_of_group; \
    last.exists = last.block < p.blocks;                                                                     \
    for (int r = 0; r < 2; r++)                                                                              \
      unit[r] = unit_from(*unit_of_row(&p, w.batch, &last, r, lane));                                        \
    if (!SPARE) {                                                                                            \
      TRY_NEXT();                                                                                            \
      NAP_AND_TRY_NEXT();                                                                                    \
      TRY_NEXT();                                                                                            \
    }                                                                                                        \
    arrived &= known;                                                                                        \
    load_statistics(lse, statistics + after.index * STATISTICS_BYTES, LSE, PAIRS);                           \
    if (READS_AHEAD) load_statistics(delta, statistics + after.index * STATISTICS_BYTES, DELTA, AHEAD);      \
    wgmma_wait(0);                                                                                           \
    bar_arrive(!is_last_group && done + 1 < steps, USED + after.index, CTA_THREADS);                         \
    at = after;                                                                                              \
    now.tile++;                                                                                              \
    done++;                                                                                                  \
  } while (0)
  bar_sync(is_last_group && steps > 0, BEGUN, CTA_THREADS);
#pragma unroll 1
  while (done < steps) {
    now.tile = 0;
#pragma unroll 1
    while (now.tile < masked_tiles)
      RUN_STEP(1);
#pragma unroll 1
    while (now.tile < w.tiles)
      RUN_STEP(0);
    now.head++;
  }

  /* The shares of the last two steps; between them dk and dv, which are complete. */
  float dq[DQ_FLOATS];
  ISSUE_DQ(steps > 0);
  SEND_SHARE();
  const float poison = arrived ? 0.f : NAN;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int columns = row[r] < p.own_rows ? p.head_dim : 0;
    store_gradient(p.from_ds, p.from_ds_stride, &w, row[r], dk, r, p.scale + poison, columns, lane);
    store_gradient(p.from_p, p.from_p_stride, &w, row[r], dv, r, 1.f + poison, columns, lane);
  }
  store_one(!arrived, p.failed + w.batch * p.own_heads + w.own_head, poison);
  bulk_wait_read();
  __syncwarp();
  wgmma_wait(0);
  if (!ELEMENT_IS_BFLOAT16) mark_rows(&p, &w, &last, dq, warp, lane);
  store_share(share_out + lane * 16, dq, unit, 0);
  store_share(share_out + lane * 16, dq, unit, DQ_FLOATS / 2);
  send_share(last.exists, sums_of(&p, w.batch, &last, group), share_out);
  bulk_wait_read();
  end_together();
}
