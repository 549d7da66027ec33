/*
 * listed_loads.cuh - how a kernel with a list asks TMA for its tiles of k and v, in place of the functions of the same
 * names in loads.cuh: keys of a sequence, one behind the other or in pages.
 */
#ifndef DHP_LISTED_LOADS_CUH
#define DHP_LISTED_LOADS_CUH

enum { LEAST_PIECE = 16 /* keys: of the smallest page */, MOST_PIECES = TILE_K / LEAST_PIECE };

/* Where a piece of a key tile lies: a row of a batch of k and of v. */
typedef struct key_place {
  int row, batch;
} key_place;

/*
 * If go: the places of all pieces of a key tile, that of piece i in lane i; `word` is the lane's of its query tile. A
 * page is followed only for keys that count; the place of others is before the first page, where zeros are read.
 */
static __device__ __forceinline__ key_place place_of_lane(const dhp_fwd_list *list, int go, int key_tile, int word,
                                                          int lane) {
  const int key = key_tile * TILE_K + lane * list->piece_keys;
  const int counts = -((go != 0) & (lane < list->pieces) & (key >= 0) & (key < OF_WORD(word, keys)));
  const int page =
      load_word_if(counts, list->page_table + ((OF_WORD(word, key_row) + (key >> list->log2_page)) & counts));
  const key_place place = {key & list->row_in_page, page | ~counts};
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

/*
 * If go: asks for this warp's part of pair u of this query tile, or of the next one if its key tile, counted from the
 * last visible one, is past the end. A tile beyond both is not asked for: load_skipped does that later. After the CTA's
 * final query tile there is no k: a tile that nobody looks at, the last one of the list, completes the pair.
 */
static __device__ __forceinline__ void load_pair(int go, const loader *l, uint32_t pairs_full, int index, int u,
                                                 const query_tile *now, const query_tile *next) {
  const int visit = u - l->loads_v, past = visit >= now->key_tiles, zeros = next->key_tiles == 0 && !l->loads_v;
  const int wanted = go && l->active && visit < now->key_tiles + next->key_tiles + zeros;
  const uint32_t to = l->tiles + index * KV_BYTES, full = pairs_full + 8 * index;
  const int key_head = past ? next->key_head : now->key_head, before = past ? now->key_tiles : 0;
  if (!l->list->with_pages) {
    const int row = (past ? next->key_row : now->key_row) - (visit - before) * TILE_K;
    load_announced<LOADS>(wanted, to, KV_BOX_BYTES, l->map, full, l->column, row, key_head, 0);
  } else if (l->finds_places) {
    const int key_tile = (past ? next->last : now->last) - (visit - before);
    const key_place mine = place_of_lane(l->list, wanted, key_tile, past ? next->word : now->word, l->lane);
    const key_place first = place_of_piece(mine, 0);
    load_announced<LOADS>(wanted, to, KV_BOX_BYTES, l->map, full, l->column, first.row, key_head, first.batch);
#pragma unroll 1
    for (int i = 1; i < l->list->pieces; i++) {
      const key_place place = place_of_piece(mine, i);
      load_boxes(wanted, to + offset_of_piece(i, l->list->piece_bytes), l->map, full, LOADS, KV_BOX_BYTES, l->column,
                 place.row, key_head, place.batch);
    }
  }
}

/* Zeros into the rows of a tile of v from this one on: the work of a warpgroup, 16 bytes a thread at a time. */
static __device__ __forceinline__ void clear_rows(uint32_t tile, int from_row, int thread) {
  const int pieces = ROW_BYTES / 16 /* of a row of a box */, rows = WARPGROUP_THREADS / pieces;
#pragma unroll
  for (int first = 0; first < TILE_K; first += rows)
#pragma unroll
    for (int box = 0; box < BOXES; box++)
      clear_shared_four(first + thread / pieces >= from_row,
                        tile + box * KV_BOX_BYTES + first * ROW_BYTES + 16 * thread);
}

#endif
