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
      mbarrier_init(base + SHARED_BARRIERS + 8 * i, DP_ALONE && 8 * i == DP_FULL ? 1 : LOADERS - DP_ALONE);
    fence_mbarrier_init();
  }
  __syncthreads();
}

/* What this warp loads of each walked tile. */
typedef struct loader {
  int active;        /* it loads of a tensor: */
  int of_s;          /* that of S; else that of dP */
  int of_statistics; /* it loads the statistics of walked queries */
  int alone;         /* its tile has one place, and a barrier of its own */
  const CUtensorMap *map;
  uint32_t tiles, full; /* shared addresses of stage 0, or of the one place, and of its barrier */
  const CUtensorMap *own_map;
  uint32_t own;  /* shared address of the owned rows that go with them */
  int own_bytes; /* of these; 0: nothing multiplies them */
} loader;

static __device__ __forceinline__ loader loader_of(int warp, const CUtensorMap *own_s_map,
                                                   const CUtensorMap *own_dp_map, const CUtensorMap *s_map,
                                                   const CUtensorMap *dp_map, uint32_t base) {
  loader l;
  l.active = warp == FIRST_LOADER || warp == FIRST_LOADER + 1;
  l.of_s = warp == FIRST_LOADER;
  l.of_statistics = OWNS_KEYS && warp == FIRST_LOADER + 2;
  l.alone = DP_ALONE && warp == FIRST_LOADER + 1;
  l.full = base + SHARED_BARRIERS + (l.alone ? DP_FULL : STAGE_FULL);
  l.map = l.of_s ? s_map : dp_map;
  l.tiles = base + (l.of_s ? SHARED_WALK_S : SHARED_WALK_DP);
  l.own_map = l.of_s ? own_s_map : own_dp_map;
  l.own = base + (l.of_s ? SHARED_OWN_S : SHARED_OWN_DP);
  l.own_bytes = l.of_s || WITH_DS ? WARPGROUPS * OWN_BYTES : 0;
  return l;
}

/* If go: asks for this warp's part of a tile, into the stage of this index; 0 where it has one place. The barrier is
 * told of that, and of so many bytes more. */
static __device__ __forceinline__ void load_tile(int go, const loader *l, const CUtensorMap *statistics_map,
                                                 uint32_t base, int index, const walk *w, place at, int heads,
                                                 int more_bytes) {
  const int wanted = go && l->active, statistics_wanted = go && l->of_statistics;
  const int row = first_row(w, at), head = w->head + at.head;
  const uint32_t full = l->full + 8 * index;
  mbarrier_arrive_expect_tx(wanted, full, WALK_BYTES + more_bytes);
  load_boxes(wanted, l->tiles + index * WALK_BYTES, l->map, full, BOXES, WALK_BOX_BYTES, 0, row, head, w->batch);
  if (OWNS_KEYS) {
    mbarrier_arrive_expect_tx(statistics_wanted, full, STATISTICS_BYTES);
    tma_load_2d(statistics_wanted, base + SHARED_STATISTICS + index * STATISTICS_BYTES, statistics_map, full, 2 * row,
                w->batch * heads + head);
  }
}

/* If go: asks for this warp's part of the first tile, and of the owned rows that it meets. Both complete on the same
 * barrier: so one wait serves them. */
static __device__ __forceinline__ void load_first(int go, const loader *l, const CUtensorMap *statistics_map,
                                                  uint32_t base, const walk *w, int heads) {
  const place first = {0, 0};
  load_tile(go, l, statistics_map, base, 0, w, first, heads, l->own_bytes);
#pragma unroll
  for (int group = 0; group < WARPGROUPS; group++)
    load_boxes(go && l->active && l->own_bytes > 0, l->own + group * OWN_BYTES, l->own_map, l->full, BOXES,
               OWN_BOX_BYTES, 0, w->own_row + group * ROWS, w->own_head, w->batch);
}

#endif
