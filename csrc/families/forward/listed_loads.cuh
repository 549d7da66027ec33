/*
 * listed_loads.cuh - how a kernel with a list asks TMA for its tiles of k and v, in place of the functions of the same
 * names in loads.cuh: keys of a sequence, one behind the other or in pages.
 */
#ifndef DHP_LISTED_LOADS_CUH
#define DHP_LISTED_LOADS_CUH

enum { LEAST_PIECE = 16 /* keys: of the smallest page */, MOST_PIECES = TILE_K / LEAST_PIECE };

/* A tile of keys: which one, counted from the one that is visited first, of which query tile. */
typedef struct key_tile {
  int step;
  query_tile of;
} key_tile;

static __device__ __forceinline__ key_tile key_tile_of(const query_tile *tile, int step) {
  const key_tile visited = {step, *tile};
  return visited;
}

/* Where a piece of a key tile lies: a row of a batch of k and of v. */
typedef struct key_place {
  int row, batch;
} key_place;

/*
 * If go: the places of all pieces of a key tile, that of piece i in lane i. A page is followed only for keys that
 * count; the place of others is before the first page, where zeros are read.
 */
static __device__ __forceinline__ key_place place_of_lane(const dhp_fwd_params *p, const dhp_fwd_list *list, int go,
                                                          const key_tile *tile, int lane) {
  int loads[4];
  words_of_tile(loads, p, list, &tile->of, DHP_TILE_OF_LOADS);
  const int keys = loads[0], key_row = loads[1];
  const int key = (tile->of.last - tile->step) * TILE_K + lane * list->piece_keys;
  const int counts = -((go != 0) & (lane < list->pieces) & (key >= 0) & (key < keys)) & list->with_pages;
  const int page = load_word_if(counts, list->page_table + ((key_row + (key >> list->log2_page)) & counts));
  key_place place;
  place.row = (key & list->row_in_page) + (key_row & ~list->with_pages);
  place.batch = (page | ~counts) & list->with_pages;
  return place;
}

static __device__ __forceinline__ key_place place_of_piece(key_place of_lane, int piece) {
  const key_place place = {__shfl_sync(FULL_MASK, of_lane.row, piece), __shfl_sync(FULL_MASK, of_lane.batch, piece)};
  return place;
}

/*
 * Bytes from the first piece of a box to this one, written so that the gate sass sees a bound of it. Key tiles that are
 * no power of two come in the smallest pieces.
 */
static __device__ __forceinline__ int offset_of_piece(int piece, int piece_bytes) {
  if ((TILE_K & (TILE_K - 1)) == 0) return piece * piece_bytes & (KV_BOX_BYTES - LEAST_PIECE * ROW_BYTES);
  int offset = 0;
#pragma unroll
  for (int i = 1; i < MOST_PIECES; i++)
    offset = piece >= i ? i * LEAST_PIECE * ROW_BYTES : offset;
  return offset;
}

/* If go: asks for this warp's part of a pair, a tile of k or of v, into a stage. */
static __device__ __forceinline__ void load_part(int go, const loader *l, uint32_t pairs_full, int index,
                                                 key_tile tile) {
  if (!l->finds_places) return;
  const uint32_t to = l->tiles + index * KV_BYTES, full = pairs_full + 8 * index;
  const int key_head = key_head_of(l->params, &tile.of);
  const key_place mine = place_of_lane(l->params, l->list, go, &tile, l->lane), first = place_of_piece(mine, 0);
  load_announced<LOADS>(go, to, KV_BOX_BYTES, l->map, full, l->column, first.row, key_head, first.batch);
#pragma unroll 1
  for (int i = 1; i < l->list->pieces; i++) {
    const key_place place = place_of_piece(mine, i);
    load_boxes(go, to + offset_of_piece(i, l->list->piece_bytes), l->map, full, LOADS, KV_BOX_BYTES, l->column,
               place.row, key_head, place.batch);
  }
}

/*
 * If go: asks for this warp's part of pair u of this query tile, or of the next one if its key tile, counted from the
 * last visible one, is past the end. A tile beyond both is not asked for: load_skipped does that later. After the CTA's
 * final query tile there is no k: a tile that nobody looks at, the last one of the list, completes the pair.
 */
static __device__ __forceinline__ void load_pair(int go, const loader *l, uint32_t pairs_full, int index, int u,
                                                 const query_tile *now, const query_tile *next) {
  const int visit = u - l->loads_v, past = visit >= now->key_tiles, zeros = next->key_tiles == 0 && !l->loads_v;
  const key_tile tile = past ? key_tile_of(next, visit - now->key_tiles) : key_tile_of(now, visit);
  const int wanted = go && l->active && visit < now->key_tiles + next->key_tiles + zeros;
  load_part(wanted, l, pairs_full, index, tile);
}

/* The same with less to compute where the pair is known to be this query tile's, and keys are in no pages: most are. */
static __device__ __forceinline__ void load_plain_pair(int go, const loader *l, uint32_t pairs_full, int index, int u,
                                                       const query_tile *now, const query_tile *next) {
  if (l->list->with_pages | (u >= now->key_tiles)) {
    load_pair(go, l, pairs_full, index, u, now, next);
  } else if (l->finds_places) {
    int loads[4];
    words_of_tile(loads, l->params, l->list, now, DHP_TILE_OF_LOADS);
    const int row = loads[1] + (now->last - (u - l->loads_v)) * TILE_K;
    load_announced<LOADS>(go, l->tiles + index * KV_BYTES, KV_BOX_BYTES, l->map, pairs_full + 8 * index, l->column, row,
                          key_head_of(l->params, now), 0);
  }
}

/* Zeros into the rows of a tile of v from this one on: the work of a warpgroup, 16 bytes a thread at a time. */
static __device__ __forceinline__ void clear_rows(uint32_t tile, int from_row, int thread) {
  const int pieces = ROW_BYTES / 16; /* of a row of a box */
#pragma unroll
  for (int i = 0; i < KV_BYTES / 16 / WARPGROUP_THREADS; i++) {
    const int piece = i * WARPGROUP_THREADS + thread;
    clear_shared_four(piece / pieces % TILE_K >= from_row, tile + 16 * piece);
  }
}

#endif
