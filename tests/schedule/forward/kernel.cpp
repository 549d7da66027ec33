/*
 * kernel.cpp - compiles the forward kernel for the host, with the constants of one shape, and tells its model where
 * things lie in shared memory. "attention_fwd.cu" is a copy that asks the functions below where a query tile lies, and
 * how many keys it sees, unless they stand in a list. SPLITS: key segments that are items of their own.
 */
#include "model.h"

#ifndef SPLITS
#define SPLITS 1
#endif

#if !LISTED
template <class Tile> static void place_as_scheduled(Tile *tile, int nth) {
  const forward::QueryTile &at = forward::tile_at(nth);
  tile->batch = at.batch;
  tile->head = at.head;
  tile->key_head = at.key_head;
  tile->row = at.row;
}

/* How many keys the first row of the query tile that begins at this one sees, and the last one of a warpgroup. */
static int scheduled_for_first(int row) {
  const forward::QueryTile &at = forward::tile_with(row);
  return (at.first_tile + at.key_tiles - at.masked) * TILE_K;
}
static int scheduled_for_last(int row, int group) {
  const forward::QueryTile &at = forward::tile_with(row);
  return (at.first_tile + at.key_tiles - at.unseen[group]) * TILE_K;
}
#if WINDOWED
/* The first key tile that rows from this one on see, the first one of a query tile or of a warpgroup; and the step from
 * which on masks are needed again. */
static int scheduled_for_bottom(int row) {
  const forward::QueryTile &at = forward::tile_with(row);
  return at.first_tile + at.left[(row - at.row) / ROWS];
}
static int scheduled_for_plain_end(int row) { return forward::tile_with(row).plain_end; }
#endif
#endif

#if LISTED
#include <algorithm>

#include "listed_words.h"
#endif

#include "attention_fwd.cu"

Index blockIdx = {0}, gridDim = {1};
char shared[1]; /* never touched: addresses are numbers here */

extern const forward::Shape forward::shape = {
    HEAD_DIM,
    TILE_K,
    WARPGROUPS,
    ROWS,
    STAGES,
    BOX_COLUMNS,
    ROW_BYTES,
    Q_BOX_BYTES,
    KV_BOX_BYTES,
    Q_PLACES,
    DHP_SHARED_ALIGN + SHARED_Q,
    DHP_SHARED_ALIGN + SHARED_K,
    DHP_SHARED_ALIGN + SHARED_V,
    DHP_SHARED_ALIGN + SHARED_BARRIERS,
    OWN_TILES != 0,
    LEAVES_EARLY != 0,
    LISTED != 0,
    WINDOWED != 0,
    SEGMENT_TILES,
    SPLITS,
    DHP_PART_COLUMNS,
    DHP_NOT_SEEN_TILES,
};

#if LISTED
/* What the family tiles would have written. Rows see all keys: what is hidden is no matter of the schedule. Every other
 * query tile sees the end of its sequence, one key before that of a key tile: a row of v to clear, not by lane 0. */
static const dhp_listed_tile *list_of_tiles() {
  the_list.clear();
  for (int i = 0; i < forward::tile_count(); i++) {
    const forward::QueryTile at = forward::tile_at(i);
    dhp_listed_tile entry = {};
    entry.keys = (at.first_tile + at.key_tiles) * TILE_K - i % 2;
    entry.key_row = at.key_row;
    entry.last_tile = at.first_tile + at.key_tiles - 1;
    entry.key_tiles = at.key_tiles;
    entry.row = at.row;
    entry.row_end = at.row + WARPGROUPS * ROWS;
    entry.last_key = DHP_TILES_FAR;
    entry.first_key = -DHP_TILES_FAR;
    entry.masked = at.masked;
    entry.plain_end = at.plain_end;
    the_list.push_back(entry);
  }
  return list_with_count();
}
#else
/* Items, each a query tile or, if they are split, one of its segments, are dealt in order to this CTA alone. */
static void set_schedule(dhp_fwd_params *p) {
  p->batch = p->q_tiles = 1;
  p->splits = SPLITS;
  p->head_groups = p->items = p->ordered_items = p->ordered_rounds = forward::tile_count() * SPLITS;
  p->by_head_groups = dhp_divisor_of(p->head_groups);
  p->by_splits = dhp_divisor_of(SPLITS);
  p->by_q_tiles = p->by_listed_groups = p->by_heads_per_key_head = dhp_divisor_of(1);
}
#endif

void model::run_warp() {
  dhp_fwd_params p = {};
  p.out = forward::OUT;
  p.out_stride[0] = forward::HEADS * forward::SEQLEN_Q * HEAD_DIM;
  p.out_stride[1] = forward::SEQLEN_Q * HEAD_DIM;
  p.out_stride[2] = HEAD_DIM;
  p.lse = forward::LSE;
  p.heads = forward::HEADS;
  p.seqlen_q = forward::SEQLEN_Q;
  p.seqlen_k = p.highest = forward::SEQLEN_K; /* every row sees all keys that there are */
  p.head_dim = HEAD_DIM;
  while (1 << p.log2_rows < ROWS)
    p.log2_rows++;
  p.scale = p.scale_log2 = 1.f;
  p.highest_score = forward::HIGHEST_SCORE;
  p.part_out = forward::OUT_OF_PARTS;
  p.part_sums = forward::SUMS_OF_PARTS;
#if LISTED
  p.head_groups = p.heads_per_key_head = 1;
  p.by_head_groups = p.by_heads_per_key_head = dhp_divisor_of(1);
  static const int32_t no_page = 0;
  const dhp_fwd_list list = {list_of_tiles(),  &no_page, 1, TILE_K, TILE_K * ROW_BYTES, 0, 0, 0, -SEGMENT_TILES, 1,
                             dhp_divisor_of(1)};
#if FORM
  static float sinks[forward::HEADS]; /* none: the model's sums have no such term */
  std::fill_n(sinks, forward::HEADS, -INFINITY);
  const dhp_fwd_forms forms = {sinks, 1, 1.f, 1.f, 1.f};
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p, list, forms);
#else
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p, list);
#endif
#elif WINDOWED
  set_schedule(&p);
  const dhp_fwd_window window = {-forward::SEQLEN_Q}; /* hides no key of what is visited */
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p, window);
#else
  set_schedule(&p);
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p);
#endif
}
