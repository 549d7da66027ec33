/*
 * kernel.cpp - compiles a backward kernel for the host, with its constants, and tells its model where things lie in
 * shared memory. KERNEL_SOURCE is a copy that asks scheduled_walk in place of walk_of.
 */
#include "model.h"

template <class Walk> static Walk scheduled_walk() {
  const backward::Walk &is = backward::walk();
  Walk w;
  w.batch = is.batch;
  w.own_head = is.own_head;
  w.own_row = is.own_row;
  w.head = is.head;
  w.heads = is.heads;
  w.start = is.start;
  w.tiles = is.tiles;
  w.masked = is.masked;
  return w;
}

#include KERNEL_SOURCE

Index blockIdx, gridDim; /* only walk_of reads them, and it is not called */
char shared[1];          /* never touched: addresses are numbers here */
/* The statistics of owned queries, in global memory. */
static float of_rows[(size_t)backward::BATCHES * backward::HEADS * backward::ROWS_OF_HEAD * 2];

extern const backward::Shape backward::shape = {
    HEAD_DIM,
    TILE_K,
    WARPGROUPS,
    ROWS,
    STAGES,
    DP_STAGES,
    OWNS_KEYS != 0,
    WITH_DS != 0,
    WITH_P != 0,
    WITH_DQ != 0,
    BOX_COLUMNS,
    ROW_BYTES,
    OWN_BOX_BYTES,
    WALK_BOX_BYTES,
    STATISTICS_BYTES,
    DS_BYTES,
    DHP_BWD_ALIGN + SHARED_OWN_S,
    DHP_BWD_ALIGN + SHARED_OWN_DP,
    DHP_BWD_ALIGN + SHARED_WALK_S,
    DHP_BWD_ALIGN + SHARED_WALK_DP,
    DHP_BWD_ALIGN + SHARED_DS,
    DHP_BWD_ALIGN + SHARED_SHARES,
    DHP_BWD_ALIGN + SHARED_STATISTICS,
    DHP_BWD_ALIGN + SHARED_BARRIERS,
};

static std::vector<uint8_t> units_of_rows() {
  std::vector<uint8_t> units((size_t)backward::BATCHES * backward::HEADS * backward::ROWS_OF_HEAD);
  for (size_t i = 0; i < units.size(); i++)
    units[i] = (uint8_t)(127 + backward::exponent_of_unit((int)i)); /* the bias of a float */
  return units;
}
static std::vector<uint8_t> units = units_of_rows();
const uint8_t *backward::units() { return ::units.data(); }

void model::run_warp() {
  dhp_bwd_params p = {};
  p.from_ds = reinterpret_cast<void *>(backward::FROM_DS);
  p.from_p = reinterpret_cast<void *>(backward::FROM_P);
  for (int64_t *stride : {p.from_ds_stride, p.from_p_stride}) {
    stride[0] = backward::BATCH_STRIDE;
    stride[1] = backward::HEAD_STRIDE;
    stride[2] = backward::ROW_STRIDE;
  }
  p.statistics = of_rows;
  p.pairs = backward::ROWS_OF_HEAD / 2;
  p.heads = p.own_heads = backward::HEADS;
  p.seqlen_q = p.seqlen_k = p.own_rows = backward::ROWS_OF_HEAD;
  p.head_dim = HEAD_DIM;
  p.scale = p.scale_log2 = 1.f;
  if (WITH_DQ) {
    p.seqlen_q = backward::query_rows();
    p.units = units.data();
    p.ordered_heads = backward::BATCHES * backward::HEADS;
    p.heads_per_key_head = 1;
    p.sums = reinterpret_cast<int32_t *>(backward::SUMS);
    p.blocks = (p.seqlen_q + 15) / 16;
    p.failed = reinterpret_cast<float *>(backward::FAILED);
    p.own_tiles = backward::ROWS_OF_HEAD / (WARPGROUPS * ROWS);
    p.spent = reinterpret_cast<uint32_t *>(backward::SPENT);
  }
  dhp_attention_bwd({backward::OWN_S}, {backward::OWN_DP}, {backward::WALK_S}, {backward::WALK_DP},
                    {backward::STATISTICS}, p);
}
