/*
 * kernel.cpp - compiles the forward kernel for the host, with the constants of one shape, and tells its model where
 * things lie in shared memory. "attention_fwd.cu" is a copy whose two calls of nth_query_tile ask scheduled_tile
 * instead.
 */
#include "model.h"

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

#include "attention_fwd.cu"

Index blockIdx, gridDim; /* only nth_query_tile reads them, and it is not called */
char shared[1];          /* never touched: addresses are numbers here */

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
};

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
  dhp_attention_fwd({forward::QUERIES}, {forward::KEYS}, {forward::VALUES}, p);
}
