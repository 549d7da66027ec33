/*
 * loads.cuh - who asks TMA for what: the stream of k and v tiles over all query tiles of a CTA, and each warpgroup's q.
 *
 * Step t of a key segment needs k(t) and v(t-1). They are a *pair*: one stage, one mbarrier, one wait. The last step's
 * v comes with k(0) of the next segment or query tile, so the stream never stops. Before this header: the constants of
 * the kernel.
 */
#ifndef DHP_FORWARD_LOADS_CUH
#define DHP_FORWARD_LOADS_CUH

#include "../../hopper/stages.cuh"
#if LISTED
#include "listed_tiles.cuh"
#else
#include "query_tiles.cuh"
#endif

/* What this warp loads of each pair. */
typedef struct loader {
  int active;  /* it loads something */
  int loads_v; /* of pair u it loads tile u - 1 of v; else tile u of k */
  const CUtensorMap *map;
  uint32_t tiles; /* shared address of its part of stage 0 */
  int column;     /* of its first box */
#if LISTED
  const dhp_fwd_list *list;
  int lane;
  /* It goes through the code that finds keys in pages, which is long. At first all warps do: there ptxas would make its
   * instructions conditional one by one, and the gate sass could not see that they belong together. */
  int finds_places;
#endif
} loader;

static __device__ __forceinline__ loader loader_of(int warp, const CUtensorMap *k_map, const CUtensorMap *v_map,
                                                   uint32_t base) {
  const int index = warp - FIRST_LOADER, loads_v = index >= LOADERS;
  const int first_box = (index - loads_v * LOADERS) * LOADS;
  loader l;
  l.active = index >= 0 && index < 2 * LOADERS;
  l.loads_v = loads_v;
  l.map = loads_v ? v_map : k_map;
  l.tiles = base + (loads_v ? SHARED_V : SHARED_K) + first_box * KV_BOX_BYTES;
  l.column = first_box * BOX_COLUMNS;
  return l;
}

#if LISTED
#include "listed_loads.cuh"
#else
/* If go: asks for this warp's part of a pair, the tile of k or of v that begins at this row, into a stage. */
static __device__ __forceinline__ void load_part(int go, const loader *l, uint32_t pairs_full, int index, int row,
                                                 int key_head, int batch) {
  load_announced<LOADS>(go, l->tiles + index * KV_BYTES, KV_BOX_BYTES, l->map, pairs_full + 8 * index, l->column, row,
                        key_head, batch);
}

/*
 * If go: asks for this warp's part of pair u of this query tile, or of the next one if its key tile, counted from the
 * last visible one, is past the end. A tile beyond both is not asked for: load_skipped does that later. After the CTA's
 * final query tile there is no k: a tile that nobody looks at completes the pair.
 */
static __device__ __forceinline__ void load_pair(int go, const loader *l, uint32_t pairs_full, int index, int u,
                                                 const query_tile *now, const query_tile *next) {
  const int visit = u - l->loads_v, past = visit >= now->key_tiles, zeros = next->key_tiles == 0 && !l->loads_v;
  const int tile = past ? next->last - (visit - now->key_tiles) : now->last - visit;
  const int key_head = past ? next->key_head : now->key_head, batch = past ? next->batch : now->batch;
  const int wanted = go && l->active && visit < now->key_tiles + next->key_tiles + zeros;
  load_part(wanted, l, pairs_full, index, tile * TILE_K, key_head, batch);
}

/* The same for a pair that is known to be this query tile's: less to compute. */
static __device__ __forceinline__ void load_own_pair(int go, const loader *l, uint32_t pairs_full, int index, int u,
                                                     const query_tile *now) {
  load_part(go && l->active, l, pairs_full, index, (now->last - (u - l->loads_v)) * TILE_K, now->key_head, now->batch);
}
#endif

/*
 * In step 0: key tiles of the next query tile that the one before this could not ask for, because this one, having so
 * few, lies between. `index` is the stage of pair 1.
 */
static __device__ __forceinline__ void load_skipped(int go, const loader *l, uint32_t pairs_full, int index,
                                                    const query_tile *now, const query_tile *next) {
  if (now->key_tiles >= STAGES) return;
#pragma unroll
  for (int u = 1; u < STAGES; u++) {
    load_pair(go && u - l->loads_v >= now->key_tiles, l, pairs_full, index, u, now, next);
    index = index_after(index);
  }
}

/*
 * A warp's 16 rows of q out of shared memory, once they are there, as the A operand of wgmma (9.7.15.5.1.1): of each 16
 * columns four matrices, rows 0 to 7 and 8 to 15 of the first eight columns, then of the others. The swizzle exchanges
 * the 16-byte pieces of a row by the row's number modulo 8.
 */
static __device__ __forceinline__ void hold_queries(uint32_t *q, uint32_t q_rows, int warp, int lane) {
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    const int box = step / 4, piece = (step % 4 * 2 + lane / 16) ^ row % 8;
    load_matrices(q + 4 * step, q_rows + box * Q_BOX_BYTES + row * ROW_BYTES + 16 * piece);
  }
}

/* If go: asks for this warpgroup's rows of q. Of rows of one segment nobody else reads them, and where there are as
 * many queries as keys they are a third of what is read: there k and v, which others read again, stay longer in L2. */
static __device__ __forceinline__ void load_queries(int go, const CUtensorMap *map, uint32_t q_rows, uint32_t full,
                                                    int row, int head, int batch) {
  mbarrier_arrive_expect_tx(go, full, Q_BYTES);
  load_boxes<ONE_SEGMENT ? tma_load_once : tma_load>(go, q_rows, map, full, BOXES, Q_BOX_BYTES, 0, row, head, batch);
}

#endif
