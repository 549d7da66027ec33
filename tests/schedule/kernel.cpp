/*
 * kernel.cpp - compiles the forward kernel for the host, with the constants of one shape, and tells the simulator where
 * things lie in its shared memory. "attention_fwd.cu" is a copy whose two calls of work_of ask scheduled_work instead.
 */
#include "simulator.h"

template <class Work> static Work scheduled_work(int round) {
  const sim::Walk walk = sim::walk_of(round);
  Work w;
  w.batch = walk.batch;
  w.head = walk.head;
  w.key_head = walk.key_head;
  w.row = walk.row;
  w.tiles = walk.tiles;
  w.masked = walk.masked;
  return w;
}

#include "attention_fwd.cu"

Index blockIdx, gridDim; /* only work_of reads them, and it is not called */
char shared[1];          /* never touched: addresses are numbers here */

namespace sim {

extern const Shape shape = {
    HEAD_DIM,
    TILE_K,
    WARPGROUPS,
    ROWS,
    STAGES,
    DHP_FWD_BOX,
    ROW_BYTES,
    Q_BOX_BYTES,
    KV_BOX_BYTES,
    DHP_FWD_SHARED_ALIGN + SHARED_Q,
    DHP_FWD_SHARED_ALIGN + SHARED_K,
    DHP_FWD_SHARED_ALIGN + SHARED_V,
    DHP_FWD_SHARED_ALIGN + SHARED_BARRIERS,
};

void run_warp() {
  dhp_fwd_params p = {};
  p.lse = LSE;
  p.heads = HEADS;
  p.seqlen_q = SEQLEN_Q;
  p.seqlen_k = SEQLEN_K;
  p.head_dim = HEAD_DIM;
  while (1 << p.log2_rows < ROWS)
    p.log2_rows++;
  p.scale = p.scale_log2 = 1.f;
  p.highest_score = 1e30f;
  dhp_attention_fwd({Tensor::queries}, {Tensor::keys}, {Tensor::values}, p);
}

} // namespace sim
