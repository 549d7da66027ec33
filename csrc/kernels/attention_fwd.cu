/*
 * attention_fwd.cu - FlashAttention forward for Hopper: out = softmax(scale q k^T) v, one CTA per (batch, head, query
 * tile).
 *
 * Path of the data: q, k, v tiles come in by TMA (128-byte swizzle), S = q k^T by wgmma from shared memory, softmax in
 * registers, P packed in registers, O += P v by wgmma, O through the warpgroup's own q rows out by TMA.
 *
 * WARPGROUPS warpgroups of 64 query rows share every k and v tile. In step t each warpgroup, in its turn, issues
 *
 *     S(t) = q k(t)^T, then O += P(t-1) v(t-1), back to back,
 *
 * hands the turn over, and computes the softmax of S(t) while the tensor cores work for the other warpgroups. The turns
 * are named barriers. With one warpgroup there is no turn to hand over; other CTAs on the multiprocessor take its
 * place.
 *
 * There are no "empty" barriers: whoever gets the turn in step t knows that every warp has finished step t-1, so the
 * places of k(t-1) and v(t-2) are free. The loader, the first warp of the last warpgroup, asks TMA for the tiles that
 * come there STAGES steps later, right after it has issued its products. Then every warp waits for the tiles of step
 * t+1, in the shadow of those products or, in a lone warpgroup, after the softmax.
 *
 * Keys are walked from the last visible tile down to tile 0, in tiles of TILE_K counted from key 0, so the tiles that
 * need a mask come first, and the order of every sum is fixed by the keys alone: a row's bits do not depend on its
 * neighbours, its batch, its head, or whether it is computed in a prefill or alone. A masked score adds exactly 0.
 *
 * CT: q, k and v only ever meet wgmma, fused multiply-adds, selects, max, ex2, rcp, lg2, conversions and quad shuffles
 * with constant lanes. Every branch, address, barrier and predicate is a function of the block index and the launch
 * parameters, or of whether a tile has arrived. A wait is a fixed sequence of suspending tries; a warp that waited in
 * vain makes all its rows NaN.
 */
#include <cuda.h>

#include "../ct.h"
#include "attention_fwd.h"
#include "ptx.cuh"
#include "wgmma.h"

/* ---- constants of this kernel ---------------------------------------------------------------------------------- */

enum {
  TILE_Q = WARPGROUPS * DHP_FWD_ROWS,
  THREADS = WARPGROUPS * DHP_FWD_WARPGROUP,
  BOXES = HEAD_DIM / DHP_FWD_BOX, /* 64-column boxes along head_dim */
  ROW_BYTES = DHP_FWD_BOX * 2,    /* one row of one box */
  Q_BOX_BYTES = TILE_Q * ROW_BYTES,
  KV_BOX_BYTES = TILE_K * ROW_BYTES,
  Q_BYTES = BOXES * Q_BOX_BYTES,
  KV_BYTES = BOXES * KV_BOX_BYTES,
  SCORES = TILE_K / 2,    /* floats of S a thread holds: 64 * TILE_K / 128 */
  OUTPUTS = HEAD_DIM / 2, /* floats of O a thread holds */
  WARPS_PER_GROUP = 4,
  LOADER_WARP = (WARPGROUPS - 1) * WARPS_PER_GROUP
};

#define FULL_MASK 0xffffffffu

/* ---- shared memory and barriers -------------------------------------------------------------------------------- */

enum { /* byte offsets from the 1024-aligned start */
       SHARED_Q = 0,
       SHARED_K = SHARED_Q + Q_BYTES,
       SHARED_V = SHARED_K + STAGES * KV_BYTES,
       SHARED_BARRIERS = SHARED_V + STAGES * KV_BYTES
};

enum mbarrier { /* byte offset of the first 8-byte mbarrier of a kind, from SHARED_BARRIERS */
                Q_FULL = 0,
                K_FULL = Q_FULL + 8,
                V_FULL = K_FULL + 8 * STAGES,
                BARRIER_BYTES = V_FULL + 8 * STAGES
};

static_assert(DHP_FWD_SHARED_ALIGN + SHARED_BARRIERS + BARRIER_BYTES ==
                  DHP_FWD_SHARED_BYTES(HEAD_DIM, TILE_K, WARPGROUPS, STAGES),
              "the host and the kernel disagree on the shared memory plan");

enum named_barrier {                              /* 0 is __syncthreads */
                     TURN = 1,                    /* + warpgroup: its turn at the tensor cores */
                     EPILOGUE = TURN + WARPGROUPS /* + warpgroup: its rows of O are in shared memory */
};

/* Threads that meet at a turn: the warpgroup that takes it and the one that hands it over, if there is another. */
#define TURN_THREADS (WARPGROUPS > 1 ? 2 * DHP_FWD_WARPGROUP : DHP_FWD_WARPGROUP)

/* ---- the static schedule --------------------------------------------------------------------------------------- */

/*
 * Which query tile of which head a CTA computes. CTAs start in the order of their index, so: heads go in groups whose
 * keys and values fit L2; inside a group the longest tiles (the last ones, under a causal mask) come first, and the
 * group's heads vary fastest.
 */
typedef struct work {
  int batch, head, key_head;
  int row;    /* first query row */
  int tiles;  /* key tiles to visit, at least 1 */
  int masked; /* how many of them need the mask: the first ones visited */
} work;

static __device__ __forceinline__ work work_of_block(const dhp_fwd_params *p) {
  work w;
  const int group_tiles = p->heads_per_group * p->q_tiles;
  const int group = (int)blockIdx.x / group_tiles;
  const int in_group = (int)blockIdx.x - group * group_tiles;
  const int group_heads = min(p->heads_per_group, p->batch * p->heads - group * p->heads_per_group);
  const int tile_from_end = in_group / group_heads;
  const int flat_head = group * p->heads_per_group + in_group - tile_from_end * group_heads;
  w.batch = flat_head / p->heads;
  w.head = flat_head - w.batch * p->heads;
  w.key_head = w.head / p->heads_per_key_head;
  w.row = (p->q_tiles - 1 - tile_from_end) * TILE_Q;

  const int seen_by_last = p->is_causal ? min(p->seqlen_k, w.row + TILE_Q + p->causal_offset) : p->seqlen_k;
  const int seen_by_first = p->is_causal ? min(p->seqlen_k, w.row + 1 + p->causal_offset) : p->seqlen_k;
  w.tiles = max((seen_by_last + TILE_K - 1) / TILE_K, 1);
  w.masked = w.tiles - max(seen_by_first, 0) / TILE_K;
  return w;
}

/* ---- loading --------------------------------------------------------------------------------------------------- */

/* A place among the STAGES tiles of k or v, and the parity that its barrier has in this round. */
typedef struct place {
  int slot;
  uint32_t parity;
} place;

static __device__ __forceinline__ place place_after(place at) {
  at.slot++;
  at.parity ^= (uint32_t)(at.slot == STAGES);
  at.slot = at.slot == STAGES ? 0 : at.slot;
  return at;
}

/* If go: asks for tile t of the walk, counted from the last visible tile, to be put at tiles_address + slot. */
static __device__ __forceinline__ void load_tile(int go, const CUtensorMap *map, uint32_t tiles_address,
                                                 uint32_t barriers_address, int slot, int t, const work *w) {
  const uint32_t destination = tiles_address + slot * KV_BYTES, full = barriers_address + 8 * slot;
  mbarrier_arrive_expect_tx(go, full, KV_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES; box++)
    tma_load(go, destination + box * KV_BOX_BYTES, map, full, box * DHP_FWD_BOX, (w->tiles - 1 - t) * TILE_K,
             w->key_head, w->batch);
}

/* ---- matrix products ------------------------------------------------------------------------------------------- */

/* s = q k^T over head_dim, 16 columns a step; the descriptors point at this warpgroup's q rows and at a k tile. */
static __device__ __forceinline__ void issue_scores(float *s, uint64_t q, uint64_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    const int box = step / 4, in_box = step % 4 * 32; /* four steps of 16 columns (32 bytes) a box */
    wgmma_scores(s, q + (box * Q_BOX_BYTES + in_box) / 16, k + (box * KV_BOX_BYTES + in_box) / 16, step != 0);
  }
  wgmma_commit();
}

/* o += p v over the tile's keys, 16 keys a step. */
static __device__ __forceinline__ void issue_output(float *o, const uint32_t *p, uint64_t v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < TILE_K / 16; step++)
    wgmma_output(o, p + 4 * step, v + step * 16 * ROW_BYTES / 16, 1);
  wgmma_commit();
}

/* ---- softmax --------------------------------------------------------------------------------------------------- */

/*
 * Running statistics of the two rows a thread shares with its quad: the wgmma accumulator gives thread l of a warp the
 * rows l / 4 and l / 4 + 8, columns 2 (l % 4) + {0, 1} of each block of eight.
 *
 * A shift is finite, and so is its product with the scale: -inf minus -inf, in a row whose scores are all masked so
 * far, would be NaN. A score of +inf still gives a sum of +inf, and the row inf / inf.
 */
typedef struct row_stats {
  float shift[2];   /* what is subtracted from the raw scores: their maximum so far, kept within +-highest_score */
  float sum[2];     /* of exp2(scaled score - scaled shift), this thread's columns only */
  float rescale[2]; /* what the last step multiplied sum by, and O still has to be multiplied by */
} row_stats;

/*
 * fma(s, scale, -shift scale) rounds shift scale first. That error is common to the row and cancels, unless it is so
 * large that exp2 leaves its range. Where the product exceeds 2^30, neighbouring floats differ by 128 and more, so the
 * row's softmax is 1 or 0; any scale gives that, and with a power of two the product is exact. Chosen by arithmetic: of
 * a select between two launch parameters ptxas makes a load under a predicate on the value.
 */
static __device__ __forceinline__ float scale_of(float shift, const dhp_fwd_params *p) {
  const float huge = 1073741824.f;
  return fmaf(greater(fabsf(shift * p->scale_log2), huge), p->scale_to_power_of_two, p->scale_log2);
}

/*
 * s becomes exp2(scale (s - shift)); statistics move on. `limit[r]` is the last visible column of row r, counted
 * from this thread's first column of the tile; read only if masked.
 */
static __device__ __forceinline__ void softmax_step(float *s, row_stats *stats, const dhp_fwd_params *p,
                                                    const int *limit, int masked) {
  if (masked) { /* a compile-time constant at every call */
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
      s[i] = column <= limit[r] ? s[i] : -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int i = 4; i < SCORES; i += 4)
      top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, 2));
    top = fmaxf(top, stats->shift[r]);
    const float shift = fminf(top, p->highest_score), scale = scale_of(shift, p), scaled = shift * scale;
    stats->rescale[r] = dhp_ct_exp2(fmaf(stats->shift[r], scale, -scaled));
    stats->shift[r] = shift;
    float sum = 0.f;
#pragma unroll
    for (int i = 2 * r; i < SCORES; i += 4) {
      s[i] = dhp_ct_exp2(fmaf(s[i], scale, -scaled));
      s[i + 1] = dhp_ct_exp2(fmaf(s[i + 1], scale, -scaled));
      sum += s[i] + s[i + 1];
    }
    stats->sum[r] = fmaf(stats->sum[r], stats->rescale[r], sum);
  }
}

/* The accumulator layout of S is the A operand layout of P: packing neighbours is all it takes. */
static __device__ __forceinline__ void pack_probabilities(uint32_t *p, const float *s) {
#pragma unroll
  for (int i = 0; i < SCORES; i += 2)
    p[i / 2] = pack_two(s[i], s[i + 1]);
}

static __device__ __forceinline__ void rescale_output(float *o, const float *rescale) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    o[i] *= rescale[i / 2 % 2];
}

/* ---- epilogue -------------------------------------------------------------------------------------------------- */

/* Puts this warp's 16 rows of o into the swizzled q rows: 16-byte chunk c of row r lies at chunk c ^ (r % 8). */
static __device__ __forceinline__ void stage_output(uint32_t q_rows, const float *o, const float *factor,
                                                    const int *keep, int lane) {
  const int row = lane % 16, chunk_in_pair = lane / 16;
#pragma unroll
  for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += 2) {
    const int c = chunk + chunk_in_pair, box = chunk / 8;
    const uint32_t address = q_rows + box * Q_BOX_BYTES + row * ROW_BYTES + ((c % 8 ^ row % 8) << 4);
    float out[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      out[i] = keep[i / 2 % 2] ? o[chunk * 4 + i] * factor[i / 2 % 2] : 0.f;
    stmatrix_x4(address, pack_two(out[0], out[1]), pack_two(out[2], out[3]), pack_two(out[4], out[5]),
                pack_two(out[6], out[7]));
  }
}

/* ---- the kernel ------------------------------------------------------------------------------------------------ */

extern "C" __global__ void __launch_bounds__(THREADS, 1) dhp_attention_fwd(const __grid_constant__ CUtensorMap q_map,
                                                                           const __grid_constant__ CUtensorMap k_map,
                                                                           const __grid_constant__ CUtensorMap v_map,
                                                                           const __grid_constant__ CUtensorMap out_map,
                                                                           const __grid_constant__ dhp_fwd_params p) {
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + DHP_FWD_SHARED_ALIGN - 1) & ~(uint32_t)(DHP_FWD_SHARED_ALIGN - 1);
  const uint32_t k_tiles = base + SHARED_K, v_tiles = base + SHARED_V;
  const uint32_t q_full = base + SHARED_BARRIERS + Q_FULL;
  const uint32_t k_full = base + SHARED_BARRIERS + K_FULL, v_full = base + SHARED_BARRIERS + V_FULL;
  const int warp = warp_index();
  const int group = warp / WARPS_PER_GROUP, lane = (int)threadIdx.x % 32;
  const int is_loader = warp == LOADER_WARP;

  /* Barriers, while the tensor maps are fetched. */
  if (warp == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    mbarrier_init(q_full, 1);
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++) {
      mbarrier_init(k_full + 8 * slot, 1);
      mbarrier_init(v_full + 8 * slot, 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  /* First loads: q, and as many tiles as there are places. */
  const work w = work_of_block(&p);
  if (is_loader) {
    mbarrier_arrive_expect_tx(1, q_full, Q_BYTES);
#pragma unroll
    for (int box = 0; box < BOXES; box++)
      tma_load(1, base + SHARED_Q + box * Q_BOX_BYTES, &q_map, q_full, box * DHP_FWD_BOX, w.row, w.head, w.batch);
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++) {
      load_tile(slot < w.tiles, &k_map, k_tiles, k_full, slot, slot, &w);
      load_tile(slot < w.tiles, &v_map, v_tiles, v_full, slot, slot, &w);
    }
  }

  /* Accumulators and this thread's two rows. */
  float o[OUTPUTS], s[SCORES];
  uint32_t probabilities[SCORES / 2];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    o[i] = 0.f;
  row_stats stats = {{-p.highest_score, -p.highest_score}, {0.f, 0.f}, {0.f, 0.f}};
  const int row[2] = {w.row + warp * 16 + lane / 4, w.row + warp * 16 + lane / 4 + 8};
  int last_key[2]; /* the last key that the row sees, -1 or less for none */
#pragma unroll
  for (int r = 0; r < 2; r++)
    last_key[r] = p.is_causal ? min(row[r] + p.causal_offset, p.seqlen_k - 1) : p.seqlen_k - 1;
  const int first_column = lane % 4 * 2;

  const uint32_t q_rows = base + SHARED_Q + group * DHP_FWD_ROWS * ROW_BYTES;
  const uint64_t q_descriptor = matrix_descriptor(q_rows, 16); /* leading bytes unused: K-major, one box a step */
  const uint64_t k_descriptor = matrix_descriptor(k_tiles, 16);
  const uint64_t v_descriptor = matrix_descriptor(v_tiles, KV_BOX_BYTES);
  const int next_turn = TURN + (group + 1) % WARPGROUPS;
  place tile = {0, 0};     /* of step t: k */
  place previous = {0, 0}; /* of step t-1: v to multiply, k to replace */
  int oldest = 0;          /* slot of step t-2: v to replace */
  int t = 0;

  /* Step 0: S(0) alone. The last warpgroup gives the first one its first turn. */
  uint32_t arrived = mbarrier_wait_both_first(q_full, 0, k_full, 0, p.zero);
  if (WARPGROUPS > 1 && group == WARPGROUPS - 1) bar_arrive(TURN, TURN_THREADS);
  bar_sync(TURN + group, TURN_THREADS);
  issue_scores(s, q_descriptor, k_descriptor);

/* Past the last tile there is no k to await: the parity of the round before is there already. */
#define AWAIT_TILES()                                                                           \
  arrived &= mbarrier_wait_both(k_full + 8 * tile.slot, tile.parity ^ (uint32_t)(t >= w.tiles), \
                                v_full + 8 * previous.slot, previous.parity, p.zero)

/* Ends the part of a step that is issued in the turn: on to step t+1. */
#define END_TURN()                         \
  do {                                     \
    t++;                                   \
    oldest = previous.slot;                \
    previous = tile;                       \
    tile = place_after(tile);              \
    if (WARPGROUPS > 1) {                  \
      AWAIT_TILES();                       \
      bar_arrive(next_turn, TURN_THREADS); \
    }                                      \
  } while (0)

/*
 * Softmax of S(t-1), after END_TURN moved t on. A lone warpgroup awaits its tiles only now, because it has no turn to
 * hand over, and with two stages they were asked for in this very step.
 */
#define SOFTMAX(masked)                                                \
  do {                                                                 \
    const int column = (w.tiles - t) * TILE_K + first_column;          \
    const int limit[2] = {last_key[0] - column, last_key[1] - column}; \
    softmax_step(s, &stats, &p, limit, masked);                        \
    if (WARPGROUPS == 1) AWAIT_TILES();                                \
  } while (0)

/* Step t > 0. A macro, because the loop exists with and without the mask and all of it lives in the kernel's registers.
 */
#define STEP(masked)                                                                                                \
  do {                                                                                                              \
    bar_sync(TURN + group, TURN_THREADS);                                                                           \
    issue_scores(s, q_descriptor, k_descriptor + tile.slot * (KV_BYTES / 16));                                      \
    issue_output(o, probabilities, v_descriptor + previous.slot * (KV_BYTES / 16));                                 \
    load_tile(is_loader && t - 1 + STAGES < w.tiles, &k_map, k_tiles, k_full, previous.slot, t - 1 + STAGES, &w);   \
    load_tile(is_loader && t > 1 && t - 2 + STAGES < w.tiles, &v_map, v_tiles, v_full, oldest, t - 2 + STAGES, &w); \
    END_TURN();                                                                                                     \
    wgmma_wait(1);                                                                                                  \
    SOFTMAX(masked);                                                                                                \
    wgmma_wait(0);                                                                                                  \
    rescale_output(o, stats.rescale);                                                                               \
    pack_probabilities(probabilities, s);                                                                           \
  } while (0)

  END_TURN();
  wgmma_wait(0);
  SOFTMAX(1);
  pack_probabilities(probabilities, s);
#pragma unroll 1
  while (t < w.masked)
    STEP(1);
#pragma unroll 1
  while (t < w.tiles)
    STEP(0);

  /* The last P v, and the sums of the quad meanwhile. */
  bar_sync(TURN + group, TURN_THREADS);
  issue_output(o, probabilities, v_descriptor + previous.slot * (KV_BYTES / 16));
  if (WARPGROUPS > 1 && group < WARPGROUPS - 1) bar_arrive(next_turn, TURN_THREADS);
  float factor[2];
  int keep[2]; /* a row that sees no key is 0, whatever its tile held */
  const float poison = arrived ? 0.f : NAN;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 1);
    stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 2);
    factor[r] = dhp_ct_reciprocal(stats.sum[r]) + poison;
    keep[r] = last_key[r] >= 0;
  }
  wgmma_wait(0);

  /* Out, through the q rows that only this warpgroup reads and no longer needs. */
  bar_sync(EPILOGUE + group, DHP_FWD_WARPGROUP);
  stage_output(q_rows + warp % WARPS_PER_GROUP * 16 * ROW_BYTES, o, factor, keep, lane);
  fence_proxy_async();
  bar_sync(EPILOGUE + group, DHP_FWD_WARPGROUP);
  if (warp % WARPS_PER_GROUP == 0) {
#pragma unroll
    for (int box = 0; box < BOXES; box++)
      tma_store(&out_map, q_rows + box * Q_BOX_BYTES, box * DHP_FWD_BOX, w.row + group * DHP_FWD_ROWS, w.head, w.batch);
    tma_store_wait();
  }

  /* lse = scale shift + ln(sum). */
  float *const lse = p.lse + ((int64_t)w.batch * p.heads + w.head) * p.seqlen_q;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float value = dhp_ct_log(stats.sum[r]) + stats.shift[r] * p.scale + poison;
    if (p.lse && lane % 4 == 0 && row[r] < p.seqlen_q) lse[row[r]] = keep[r] ? value : -INFINITY;
  }
}
