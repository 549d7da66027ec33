/*
 * loads.cuh - who asks TMA for what: a CTA's owned rows once, and the stream of walked tiles.
 *
 * Before this header: layout.cuh.
 */
#ifndef DHP_BACKWARD_LOADS_CUH
#define DHP_BACKWARD_LOADS_CUH

#include "walk.cuh"

/* Barriers, while the tensor maps are fetched. */
static __device__ __forceinline__ void make_barriers(int warp, uint32_t base, const CUtensorMap *own_s_map,
                                                     const CUtensorMap *walk_s_map, const CUtensorMap *walk_dp_map) {
  if (warp == 0) {
    tma_prefetch_map(own_s_map);
    tma_prefetch_map(walk_s_map);
    tma_prefetch_map(walk_dp_map);
#pragma unroll
    for (int i = 0; i < BARRIER_BYTES / 8; i++)
      mbarrier_init(base + SHARED_BARRIERS + 8 * i, i == 0 ? WARPGROUPS : LOADERS);
    fence_mbarrier_init();
  }
  __syncthreads();
}

/* What this warp loads of each walked tile. */
typedef struct loader {
  int active;        /* it loads of a tensor: */
  int of_s;          /* that of S; else that of dP */
  int of_statistics; /* it loads the statistics of walked queries */
  const CUtensorMap *map;
  uint32_t tiles; /* shared address of stage 0 */
} loader;

static __device__ __forceinline__ loader loader_of(int warp, const CUtensorMap *s_map, const CUtensorMap *dp_map,
                                                   uint32_t base) {
  loader l;
  l.active = warp == FIRST_LOADER || warp == FIRST_LOADER + 1;
  l.of_s = warp == FIRST_LOADER;
  l.of_statistics = OWNS_KEYS && warp == FIRST_LOADER + 2;
  l.map = l.of_s ? s_map : dp_map;
  l.tiles = base + (l.of_s ? SHARED_WALK_S : SHARED_WALK_DP);
  return l;
}

/* If go: asks for this warp's part of a tile, into the stage of this index. */
static __device__ __forceinline__ void load_tile(int go, const loader *l, const CUtensorMap *statistics_map,
                                                 uint32_t base, int index, const walk *w, place at, int heads) {
  const int wanted = go && l->active, statistics_wanted = go && l->of_statistics;
  const int row = first_row(w, at), head = w->head + at.head;
  const uint32_t full = base + SHARED_BARRIERS + STAGE_FULL + 8 * index;
  mbarrier_arrive_expect_tx(wanted, full, WALK_BYTES);
  load_boxes(wanted, l->tiles + index * WALK_BYTES, l->map, full, BOXES, WALK_BOX_BYTES, 0, row, head, w->batch);
  if (OWNS_KEYS) {
    mbarrier_arrive_expect_tx(statistics_wanted, full, STATISTICS_BYTES);
    tma_load_2d(statistics_wanted, base + SHARED_STATISTICS + index * STATISTICS_BYTES, statistics_map, full, 2 * row,
                w->batch * heads + head);
  }
}

/* If go: asks for this warpgroup's owned rows of both tensors. */
static __device__ __forceinline__ void load_own(int go, const CUtensorMap *s_map, const CUtensorMap *dp_map,
                                                uint32_t base, int group, const walk *w) {
  const uint32_t full = base + SHARED_BARRIERS + OWN_FULL;
  const int row = w->own_row + group * ROWS;
  mbarrier_arrive_expect_tx(go, full, OWNED * OWN_BYTES);
  load_boxes(go, base + SHARED_OWN_S + group * OWN_BYTES, s_map, full, BOXES, OWN_BOX_BYTES, 0, row, w->own_head,
             w->batch);
  if (WITH_DS)
    load_boxes(go, base + SHARED_OWN_DP + group * OWN_BYTES, dp_map, full, BOXES, OWN_BOX_BYTES, 0, row, w->own_head,
               w->batch);
}

#endif
