/*
 * kernel.cpp - compiles the forward kernel for the host, with the constants of one shape, and tells its model where
 * things lie in shared memory. "attention_fwd.cu" is a copy whose two calls of nth_query_tile ask scheduled_tile
 * instead.
 */
#include "model.h"

#if !LISTED
template <class Tile> static Tile scheduled_tile(int nth) {
  const forward::QueryTile at = forward::tile_at(nth);
  Tile tile;
  tile.batch = at.batch;
  tile.head = at.head;
  tile.key_head = at.key_head;
  tile.row = at.row;
  tile.key_tiles = at.key_tiles;
  tile.masked = at.masked;
  return tile;
}
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
    DHP_SHARED_ALIGN + SHARED_Q,
    DHP_SHARED_ALIGN + SHARED_K,
    DHP_SHARED_ALIGN + SHARED_V,
    DHP_SHARED_ALIGN + SHARED_BARRIERS,
    LISTED != 0,
};

#if LISTED
#include <algorithm>
#include <vector>

/* What the family tiles would have written. Rows see all keys: what is hidden is no matter of the schedule. */
static std::vector<dhp_listed_tile> list_of_tiles() {
  std::vector<dhp_listed_tile> list;
  for (int i = 0; i < forward::tile_count(); i++) {
    const forward::QueryTile at = forward::tile_at(i);
    dhp_listed_tile entry = {};
    entry.keys = at.key_tiles * TILE_K;
    entry.key_row = at.key_row;
    entry.last_tile = at.key_tiles - 1;
    entry.key_tiles = at.key_tiles;
    entry.row = at.row;
    entry.row_end = at.row + WARPGROUPS * ROWS;
    entry.last_key = DHP_TILES_FAR;
    entry.first_key = -DHP_TILES_FAR;
    entry.masked = at.masked;
    entry.plain_end = at.plain_end;
    list.push_back(entry);
  }
  return list;
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
  p.seqlen_k = forward::SEQLEN_K;
  p.head_dim = HEAD_DIM;
  while (1 << p.log2_rows < ROWS)
    p.log2_rows++;
  p.scale = p.scale_log2 = 1.f;
  p.highest_score = 1e30f;
#if LISTED
  const std::vector<dhp_listed_tile> tiles = list_of_tiles();
  p.items = (int32_t)tiles.size();
  p.head_groups = p.heads_per_key_head = 1;
  p.by_head_groups = p.by_heads_per_key_head = dhp_divisor_of(1);
  static const int32_t no_page = 0;
  const dhp_fwd_list list = {tiles.data(), &no_page, 1, TILE_K, TILE_K * ROW_BYTES, 0, 0, -1};
#if FORM
  static float sinks[forward::HEADS]; /* none: the model's sums have no such term */
  std::fill_n(sinks, forward::HEADS, -INFINITY);
  const dhp_fwd_forms forms = {sinks, 1.f, 1.f, 1.f};
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p, list, forms);
#else
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p, list);
#endif
#else
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p);
#endif
}
