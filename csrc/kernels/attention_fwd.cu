/*
 * attention_fwd.cu - FlashAttention forward for Hopper: out = softmax(scale q k^T) v. A CTA stays on its multiprocessor
 * and computes one query tile after another, each a "walk" over the keys that the tile sees.
 *
 * Path of the data: q, k, v tiles come in by TMA (128-byte swizzle), S = q k^T by wgmma from shared memory, softmax in
 * registers, P packed in registers, O += P v by wgmma, O from registers to global memory.
 *
 * WARPGROUPS warpgroups of ROWS query rows share every k and v tile and take turns at the tensor cores. Turn 0 of a
 * walk is S(0) alone. In turn t each warpgroup issues
 *
 *     S(t) = q k(t)^T, then O += P(t-1) v(t-1), back to back,
 *
 * hands the turn over, and computes the softmax of S(t) while the tensor cores work for the other warpgroups. The last
 * turn is P v alone; the next walk's q is loaded and O is stored while the others go on. The turns are named barriers.
 * With one warpgroup there is no turn to hand over; if CTAS is not 1, others on the multiprocessor fill the gaps.
 *
 * Turn t needs the pair k(t), v(t-1), which shares a place in shared memory and a barrier; the last turn's v comes with
 * the next walk's k(0). Before turn t the last warpgroup meets the others' end of turn t-1: the place of the pair of
 * turn t-1 is free, and the loaders, warps of the last warpgroup, ask TMA for the pair that comes there STAGES turns
 * after that one, in the next walk if this one ends before. So the stream of tiles never stops, and asking costs no
 * time while others have the turn. A lone warpgroup asks after it has issued its products.
 *
 * Keys are walked from the last visible tile down to tile 0, in tiles of TILE_K counted from key 0, so the tiles that
 * need a mask come first, and the order of every sum is fixed by the keys alone: a row's bits do not depend on its
 * neighbours, its batch, its head, or whether it is computed in a prefill or alone. A masked score adds exactly 0.
 *
 * CT: q, k and v only ever meet wgmma, fused multiply-adds, selects, max, ex2, rcp, lg2, conversions and quad shuffles
 * with constant lanes. Every branch, address, barrier and predicate is a function of the block index and the launch
 * parameters, or of whether a tile has arrived. A wait is a fixed sequence of suspending tries; a warp that waited in
 * vain makes all its rows NaN from then on.
 */
#include <cuda.h>

#include "../ct.h"
#include "attention_fwd.h"
#include "ptx.cuh"
#include "wgmma.h"

/* ---- constants of this kernel ---------------------------------------------------------------------------------- */

enum {
  THREADS = WARPGROUPS * DHP_FWD_WARPGROUP,
  BOXES = HEAD_DIM / DHP_FWD_BOX, /* 64-column boxes along head_dim */
  ROW_BYTES = DHP_FWD_BOX * 2,    /* one row of one box */
  Q_BOX_BYTES = ROWS * ROW_BYTES,
  KV_BOX_BYTES = TILE_K * ROW_BYTES,
  Q_BYTES = BOXES * Q_BOX_BYTES, /* of one warpgroup */
  KV_BYTES = BOXES * KV_BOX_BYTES,
  SCORES = TILE_K / 2,     /* floats of S a thread holds: 64 * TILE_K / 128 */
  OUTPUTS = HEAD_DIM / 2,  /* floats of O a thread holds */
  THREAD_ROWS = ROWS / 32, /* rows that a thread computes, of the two that wgmma gives it */
  WARPS_PER_GROUP = 4,
  FIRST_LOADER = (WARPGROUPS - 1) * WARPS_PER_GROUP,
  LOADS = BOXES > 2 ? BOXES / 2 : 1, /* boxes that a loader asks for at a time, so that four warps at most load */
  LOADERS = BOXES / LOADS            /* of k; as many of v */
};

#define FULL_MASK 0xffffffffu

/* ---- shared memory and barriers -------------------------------------------------------------------------------- */

enum { /* byte offsets from the 1024-aligned start */
       SHARED_Q = 0,
       SHARED_K = SHARED_Q + WARPGROUPS * Q_BYTES,
       SHARED_V = SHARED_K + STAGES * KV_BYTES,
       SHARED_BARRIERS = SHARED_V + STAGES * KV_BYTES
};

enum mbarrier {             /* byte offset of the first 8-byte mbarrier of a kind, from SHARED_BARRIERS */
                Q_FULL = 0, /* + 8 warpgroup */
                PAIR_FULL = Q_FULL + 8 * WARPGROUPS, /* + 8 slot */
                BARRIER_BYTES = PAIR_FULL + 8 * STAGES
};

static_assert(DHP_FWD_SHARED_ALIGN + SHARED_BARRIERS + BARRIER_BYTES ==
                  DHP_FWD_SHARED_BYTES(HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES),
              "the host and the kernel disagree on the shared memory plan");

enum named_barrier {                               /* 0 is __syncthreads */
                     TURN = 1,                     /* + warpgroup: its turn at the tensor cores */
                     FINISHED = TURN + WARPGROUPS, /* + slot of turn t: all have finished turn t-1 */
                     SCORED = FINISHED + STAGES    /* + slot of turn t: all have the scores of turn t-1 */
};

/* Threads that meet at a turn: the warpgroup that takes it and the one that hands it over. */
#define TURN_THREADS (2 * DHP_FWD_WARPGROUP)

/* ---- the static schedule --------------------------------------------------------------------------------------- */

/*
 * One query tile: which rows of which heads. Items are dealt to CTAs in rounds: first packs of heads in order, then a
 * list.
 *
 * In order: all tiles of one pack after the other. Under a causal mask packs go in twos, twins, and an item is two
 * tiles, a walk each: one of the first pack, and its mirror image in the second; together they are equally long, unless
 * few keys or an offset cut the diagonal off. Half of the CTAs have the longer one first: so all tiles of a pack are
 * computed at a time, its keys come from device memory once, and every round brings as many new ones.
 *
 * The list, under a causal mask only: the remaining packs, longest tiles first, packs fastest. Every other round is
 * dealt from the last CTA to the first. Whole rounds of items in order would leave CTAs idle in the last one.
 */
typedef struct work {
  int batch, head, key_head; /* head: the first of the pack */
  int row;                   /* first query row */
  int tiles;                 /* key tiles to visit; 0 if there is no such query tile: then nothing else counts */
  int masked;                /* how many of them need the mask: the first ones visited */
} work;

/* n / d. */
static __device__ __forceinline__ int quotient(int n, dhp_divisor by) {
  return (int)(__umulhi(2 * (uint32_t)n, by.multiplier) >> by.shift);
}

/* Of this CTA, its walk number `walk`. */
static __device__ __forceinline__ work work_of(const dhp_fwd_params *p, int walk) {
  work w;
  const int rows = WARPGROUPS << p->log2_rows;
  const int cta = (int)blockIdx.x, ctas = (int)gridDim.x;
  const int ordered_rounds = p->ordered_rounds + (cta < p->ordered_rest), ordered_walks = ordered_rounds << p->twins;
  const int in_order = walk < ordered_walks;
  const int round = in_order ? walk >> p->twins : walk - ordered_walks + ordered_rounds;
  const int second = in_order & p->twins & walk, reverse = in_order ? 0 : (round - p->ordered_rounds) & 1;
  const int item = round * ctas + (reverse ? ctas - 1 - cta : cta);
  const int index = max(min(item, p->items - 1) - (in_order ? 0 : p->ordered_items), 0);
  const dhp_divisor by = in_order ? p->by_q_tiles : p->by_listed_packs;
  const int whole = quotient(index, by), rest = index - whole * (in_order ? p->q_tiles : p->listed_packs);
  const int flat_pack = in_order ? (whole << p->twins) + second : p->batch * p->packs - p->listed_packs + rest;
  const int shorter = in_order ? rest : whole;
  const int tile = second ? shorter : p->q_tiles - 1 - shorter;
  w.batch = quotient(flat_pack, p->by_packs);
  w.head = (flat_pack - w.batch * p->packs) * (ROWS >> p->log2_rows);
  w.key_head = quotient(w.head, p->by_heads_per_key_head);
  w.row = tile * rows;

  const int seen_by_last = p->is_causal ? min(p->seqlen_k, w.row + rows + p->causal_offset) : p->seqlen_k;
  const int seen_by_first = p->is_causal ? min(p->seqlen_k, w.row + 1 + p->causal_offset) : p->seqlen_k;
  const int tiles = max((seen_by_last + TILE_K - 1) / TILE_K, 1);
  w.masked = tiles - max(seen_by_first, 0) / TILE_K;
  w.tiles = item < p->items ? tiles : 0;
  return w;
}

/* ---- loading --------------------------------------------------------------------------------------------------- */

/* The place of a pair, and the parity that its barrier has in this round. */
typedef struct place {
  int slot;
  uint32_t parity;
} place;

static __device__ __forceinline__ int slot_after(int slot) { return slot + 1 == STAGES ? 0 : slot + 1; }

static __device__ __forceinline__ place place_after(place at) {
  const int slot = slot_after(at.slot);
  const place after = {slot, at.parity ^ (uint32_t)(slot == 0)};
  return after;
}

/* What this warp loads of each pair. */
typedef struct loader {
  int active; /* it loads something */
  int late;   /* 1 for v: of pair u it is tile u - 1 */
  const CUtensorMap *map;
  uint32_t tiles; /* shared address of its part of place 0 */
  int column;     /* of its first box */
} loader;

static __device__ __forceinline__ loader loader_of(int warp, const CUtensorMap *k_map, const CUtensorMap *v_map,
                                                   uint32_t base) {
  const int index = warp - FIRST_LOADER, loads_v = index >= LOADERS;
  const int first_box = (index - loads_v * LOADERS) * LOADS;
  loader l;
  l.active = index >= 0 && index < 2 * LOADERS;
  l.late = loads_v;
  l.map = loads_v ? v_map : k_map;
  l.tiles = base + (loads_v ? SHARED_V : SHARED_K) + first_box * KV_BOX_BYTES;
  l.column = first_box * DHP_FWD_BOX;
  return l;
}

/*
 * If go: asks for this warp's part of pair u of this walk, or of the next walk if its tile, counted from the last
 * visible one, is past the end. A tile beyond both walks is not asked for: load_skipped does that later. After the
 * CTA's final walk there is no k: a tile of zeros, from before the first key, completes the pair.
 */
static __device__ __forceinline__ void load_pair(int go, const loader *l, uint32_t pairs_full, int slot, int u,
                                                 const work *w, const work *next) {
  const int index = u - l->late, past = index >= w->tiles, zeros = next->tiles == 0 && !l->late;
  const int tile = past ? next->tiles - 1 - (index - w->tiles) : w->tiles - 1 - index;
  const int key_head = past ? next->key_head : w->key_head, batch = past ? next->batch : w->batch;
  const int wanted = go && l->active && index < w->tiles + next->tiles + zeros;
  const uint32_t full = pairs_full + 8 * slot;
  mbarrier_arrive_expect_tx(wanted, full, LOADS * KV_BOX_BYTES);
#pragma unroll
  for (int box = 0; box < LOADS; box++)
    tma_load(wanted, l->tiles + slot * KV_BYTES + box * KV_BOX_BYTES, l->map, full, l->column + box * DHP_FWD_BOX,
             tile * TILE_K, key_head, batch);
}

/*
 * In turn 0: tiles of the next walk that the walk before this one could not ask for, because this one, being so short,
 * lies between. `slot` is that of pair 1.
 */
static __device__ __forceinline__ void load_skipped(int go, const loader *l, uint32_t pairs_full, int slot,
                                                    const work *w, const work *next) {
#pragma unroll
  for (int u = 1; u < STAGES; u++) {
    load_pair(go && u - l->late >= w->tiles, l, pairs_full, slot, u, w, next);
    slot = slot_after(slot);
  }
}

/* If go: asks for this warpgroup's rows of q. */
static __device__ __forceinline__ void load_queries(int go, const CUtensorMap *map, uint32_t q_rows, uint32_t full,
                                                    int row, const work *w) {
  mbarrier_arrive_expect_tx(go, full, Q_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES; box++)
    tma_load(go, q_rows + box * Q_BOX_BYTES, map, full, box * DHP_FWD_BOX, row, w->head, w->batch);
}

/* ---- matrix products ------------------------------------------------------------------------------------------- */

/*
 * s = q k^T over head_dim, 16 columns a step; the descriptors are of this warpgroup's q rows and of a k tile. The fence
 * covers the products that follow, too: all registers they read were written before.
 */
static __device__ __forceinline__ void issue_scores(float *s, uint32_t q, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    const int box = step / 4, in_box = step % 4 * 32; /* four steps of 16 columns (32 bytes) a box */
    wgmma_scores(s, q + (box * Q_BOX_BYTES + in_box) / 16, k + (box * KV_BOX_BYTES + in_box) / 16, step != 0);
  }
  wgmma_commit();
}

/* o = p v, or o += p v, over the tile's keys, 16 keys a step. */
static __device__ __forceinline__ void issue_output(float *o, const uint32_t *p, uint32_t v, int accumulate) {
#pragma unroll
  for (int step = 0; step < TILE_K / 16; step++)
    wgmma_output(o, p + 4 * step, v + step * 16 * ROW_BYTES / 16, step != 0 || accumulate);
  wgmma_commit();
}

/* ---- softmax --------------------------------------------------------------------------------------------------- */

/*
 * Running statistics of the rows a thread shares with its quad: the wgmma accumulator gives thread l of a warp the rows
 * l / 4 and l / 4 + 8, columns 2 (l % 4) + {0, 1} of each block of eight. With 32 rows to a warpgroup the second row is
 * nobody's: its scores are never looked at, its probabilities 0.
 *
 * A shift is finite, and so is its product with the scale: -inf minus -inf, in a row whose scores are all masked so
 * far, would be NaN. A score of +inf still gives a sum of +inf, and the row inf / inf.
 */
typedef struct row_stats {
  float shift[THREAD_ROWS];   /* subtracted from the raw scores: their maximum so far, within +-highest_score */
  float sum[THREAD_ROWS];     /* of exp2(scaled score - scaled shift), this thread's columns only */
  float rescale[THREAD_ROWS]; /* what the last step multiplied sum by, and O still has to be multiplied by */
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
      if (r < THREAD_ROWS) s[i] = column <= limit[r] ? s[i] : -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; r++) {
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
    p[i / 2] = i / 2 % 2 < THREAD_ROWS ? pack_two(s[i], s[i + 1]) : 0;
}

static __device__ __forceinline__ void rescale_output(float *o, const float *rescale) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    if (i / 2 % 2 < THREAD_ROWS) o[i] *= rescale[i / 2 % 2];
}

/* ---- epilogue -------------------------------------------------------------------------------------------------- */

/* Lanes l and l ^ mask swap: the one whose bit is clear gives b and keeps a, the other gives a and keeps b. */
static __device__ __forceinline__ void swap_across(uint32_t *a, uint32_t *b, int bit_set, int mask) {
  const uint32_t got = __shfl_xor_sync(FULL_MASK, bit_set ? *a : *b, mask);
  *a = bit_set ? got : *a;
  *b = bit_set ? *b : got;
}

/*
 * Stores this thread's row r: the four lanes of a quad, which hold two columns of each block of eight, first
 * exchange them so that each has one block of four, then store 16 bytes each. `mask` is all ones, or 0 for a row of
 * zeros; `columns` is 0 for a row beyond the tensor.
 */
static __device__ __forceinline__ void store_row(char *out, const float *o, int r, float factor, uint32_t mask,
                                                 int columns, int lane) {
  const int in_quad = lane % 4;
#pragma unroll
  for (int block = 0; block < HEAD_DIM / 8; block += 4) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *const two = o + (block + i) * 4 + 2 * r;
      x[i] = pack_two(two[0] * factor, two[1] * factor) & mask;
    }
    swap_across(&x[0], &x[1], in_quad & 1, 1);
    swap_across(&x[2], &x[3], in_quad & 1, 1);
    swap_across(&x[0], &x[2], in_quad & 2, 2);
    swap_across(&x[1], &x[3], in_quad & 2, 2);
    store_four((block + in_quad) * 8 < columns, out + (block + in_quad) * 16, x);
  }
}

/* ---- the kernel ------------------------------------------------------------------------------------------------ */

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
dhp_attention_fwd(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ dhp_fwd_params p) {
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + DHP_FWD_SHARED_ALIGN - 1) & ~(uint32_t)(DHP_FWD_SHARED_ALIGN - 1);
  const int warp = warp_index();
  const int group = warp / WARPS_PER_GROUP, lane = (int)threadIdx.x % 32;
  const uint32_t pairs_full = base + SHARED_BARRIERS + PAIR_FULL;
  const uint32_t q_full = base + SHARED_BARRIERS + Q_FULL + 8 * group;
  const uint32_t q_rows = base + SHARED_Q + group * Q_BYTES;
  const uint32_t q_descriptor = matrix_descriptor(q_rows, 16); /* leading bytes unused: K-major, one box a step */
  const uint32_t k_descriptor = matrix_descriptor(base + SHARED_K, 16);
  const uint32_t v_descriptor = matrix_descriptor(base + SHARED_V, KV_BOX_BYTES);
  const int is_last_group = group == WARPGROUPS - 1, next_turn = TURN + (group + 1) % WARPGROUPS;

  /* Barriers, while the tensor maps are fetched. */
  if (warp == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
#pragma unroll
    for (int i = 0; i < BARRIER_BYTES / 8; i++)
      mbarrier_init(base + SHARED_BARRIERS + 8 * i, i < WARPGROUPS ? 1 : 2 * LOADERS);
    fence_mbarrier_init();
  }
  __syncthreads();

  /* First loads: q, and this walk's tiles for as many pairs as there are places; there is no v before the first. */
  int walk = 0;
  work w = work_of(&p, walk);
  const loader load = loader_of(warp, &k_map, &v_map, base);
  const int loads_q = warp % WARPS_PER_GROUP == 0;
  await_launches_before();
  begin_launches_after();
  load_queries(loads_q, &q_map, q_rows, q_full, w.row + (group << p.log2_rows), &w);
#pragma unroll
  for (int u = 0; u < STAGES; u++)
    load_pair(u >= load.late && u - load.late < w.tiles, &load, pairs_full, u, u, &w, &w);
  mbarrier_arrive_expect_tx(load.active && load.late, pairs_full, 0);

  float o[OUTPUTS], s[SCORES];
  uint32_t probabilities[SCORES / 2];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    o[i] = 0.f;
  place pair = {0, 0}; /* that the next turn needs */
  uint32_t q_parity = 0;
  uint32_t arrived = mbarrier_wait_long(q_full, 0, p.zero) & mbarrier_wait_long(pairs_full, 0, p.zero);
  bar_arrive(WARPGROUPS > 1 && is_last_group, TURN, TURN_THREADS); /* the first warpgroup's first turn */

/* With two places for pairs k is asked for before v, or it would come too late: at once when all have their scores. */
#define EARLY_K (WARPGROUPS > 1 && STAGES == 2)

/* If go: into the place of turn `done`, for STAGES turns later. */
#define LOAD_PAIR(go, done) \
  load_pair((go) && arrived, &load, pairs_full, pair.slot == 0 ? STAGES - 1 : pair.slot - 1, (done) + STAGES, &w, &next)

/* S(t) has come. */
#define LOAD_K()                                               \
  do {                                                         \
    if (EARLY_K) {                                             \
      bar_arrive(!is_last_group, SCORED + pair.slot, THREADS); \
      bar_sync(is_last_group, SCORED + pair.slot, THREADS);    \
      LOAD_PAIR(!load.late, t);                                \
    }                                                          \
  } while (0)

/* Turn t > 0 begins: this warpgroup has finished turn t-1 (the last one knows it of all), and has the tensor cores. */
#define BEGIN_TURN()                                                             \
  do {                                                                           \
    bar_arrive(WARPGROUPS > 1 && !is_last_group, FINISHED + pair.slot, THREADS); \
    bar_sync(WARPGROUPS == 1 || is_last_group, FINISHED + pair.slot, THREADS);   \
    if (WARPGROUPS > 1) {                                                        \
      LOAD_PAIR(!EARLY_K || load.late, t - 1);                                   \
      bar_sync(1, TURN + group, TURN_THREADS);                                   \
    }                                                                            \
  } while (0)

/* What is issued in the turn has been issued. A lone warpgroup loads now: before, it would delay the products. */
#define HAND_OVER(is_final)                                             \
  do {                                                                  \
    bar_arrive(WARPGROUPS > 1 && !(is_final), next_turn, TURN_THREADS); \
    if (WARPGROUPS == 1) LOAD_PAIR(1, t - 1);                           \
  } while (0)

#define ISSUE_SCORES() issue_scores(s, q_descriptor, k_descriptor + pair.slot * (KV_BYTES / 16))
#define ISSUE_OUTPUT() issue_output(o, probabilities, v_descriptor + pair.slot * (KV_BYTES / 16), t > 1)

/* Softmax of S(t); then the pair of the next turn is awaited. */
#define SOFTMAX(masked)                                                        \
  do {                                                                         \
    const int column = (w.tiles - 1 - t) * TILE_K + lane % 4 * 2;              \
    int limit[THREAD_ROWS];                                                    \
    for (int r = 0; r < THREAD_ROWS; r++)                                      \
      limit[r] = last_key[r] - column;                                         \
    softmax_step(s, &stats, &p, limit, masked);                                \
    t++;                                                                       \
    arrived &= mbarrier_wait(pairs_full + 8 * pair.slot, pair.parity, p.zero); \
  } while (0)

/* Turn t > 0. A macro, because the loop exists with and without the mask and all of it lives in the kernel's registers.
 */
#define TURN_OF(masked)                   \
  do {                                    \
    BEGIN_TURN();                         \
    ISSUE_SCORES();                       \
    ISSUE_OUTPUT();                       \
    HAND_OVER(0);                         \
    pair = place_after(pair);             \
    wgmma_wait(1);                        \
    LOAD_K();                             \
    SOFTMAX(masked);                      \
    wgmma_wait(0);                        \
    rescale_output(o, stats.rescale);     \
    pack_probabilities(probabilities, s); \
  } while (0)

#pragma unroll 1
  do {
    row_stats stats;
    int t = 0;
    int head[THREAD_ROWS], row[THREAD_ROWS], last_key[THREAD_ROWS]; /* head: in the pack; last_key: that the row sees */
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
      const int of_group = warp % WARPS_PER_GROUP * (ROWS / WARPS_PER_GROUP) + lane / 4 + 8 * r;
      stats.shift[r] = -p.highest_score;
      stats.sum[r] = stats.rescale[r] = 0.f;
      head[r] = of_group >> p.log2_rows;
      row[r] = w.row + (group << p.log2_rows) + (of_group & ((1 << p.log2_rows) - 1));
      last_key[r] = p.is_causal ? min(row[r] + p.causal_offset, p.seqlen_k - 1) : p.seqlen_k - 1;
    }

    /* Turn 0. */
    arrived &= mbarrier_wait(q_full, q_parity, p.zero);
    q_parity ^= 1;
    bar_sync(WARPGROUPS > 1, TURN + group, TURN_THREADS);
    ISSUE_SCORES();
    bar_arrive(WARPGROUPS > 1, next_turn, TURN_THREADS);
    pair = place_after(pair);
    const work next = work_of(&p, ++walk);
    load_skipped((int)arrived, &load, pairs_full, pair.slot, &w, &next);
    wgmma_wait(0);
    LOAD_K();
    SOFTMAX(1);
    pack_probabilities(probabilities, s);

    /* Turns 1 to tiles - 1. */
#pragma unroll 1
    while (t < w.masked)
      TURN_OF(1);
#pragma unroll 1
    while (t < w.tiles)
      TURN_OF(0);

    /* The last turn: P v, and the sums of the quad meanwhile. */
    BEGIN_TURN();
    load_queries(loads_q && arrived && next.tiles > 0, &q_map, q_rows, q_full, next.row + (group << p.log2_rows),
                 &next);
    wgmma_fence();
    ISSUE_OUTPUT();
    HAND_OVER(is_last_group && next.tiles == 0);
    float factor[THREAD_ROWS];
    const float poison = arrived ? 0.f : NAN;
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
      stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 1);
      stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 2);
      factor[r] = dhp_ct_reciprocal(stats.sum[r]) + poison;
    }
    wgmma_wait(0);
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
      const int inside = row[r] < p.seqlen_q, sees_none = last_key[r] < 0;
      const int64_t at = w.batch * p.out_stride[0] + (w.head + head[r]) * p.out_stride[1] + row[r] * p.out_stride[2];
      /* a row that sees no key is 0, whatever its tile held */
      store_row((char *)p.out + 2 * at, o, r, factor[r], (uint32_t)sees_none - 1, inside ? p.head_dim : 0, lane);
      /* lse = scale shift + ln(sum) */
      const float lse = dhp_ct_log(stats.sum[r]) + stats.shift[r] * p.scale + poison;
      store_one(p.lse != 0 && lane % 4 == 0 && inside,
                p.lse + ((int64_t)w.batch * p.heads + w.head + head[r]) * p.seqlen_q + row[r],
                sees_none ? -INFINITY : lse);
    }
    w = next;
  } while (w.tiles > 0);
}
