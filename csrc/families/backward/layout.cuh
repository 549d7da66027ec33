/*
 * layout.cuh - the constants of one backward kernel, and what lies where in its shared memory.
 *
 * HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, CTAS_PER_SM, OWNS_KEYS, WITH_DS, WITH_P, WITH_DQ
 * and DP_STAGES come from family.py.
 */
#ifndef DHP_BACKWARD_LAYOUT_CUH
#define DHP_BACKWARD_LAYOUT_CUH

#include "../../hopper/dq_format.h"
#include "../../hopper/stages.cuh"
#include "../../hopper/turns.cuh"
#include "params.h"

enum {
  BOXES = HEAD_DIM / BOX_COLUMNS, /* 64-column boxes along head_dim */
  OWNED = 1 + WITH_DS,            /* owned tensors: of S, and of dP if that is computed */
  WALK = TILE_K,                  /* rows of a walked tile */
  OWN_BOX_BYTES = ROWS * ROW_BYTES,
  WALK_BOX_BYTES = WALK * ROW_BYTES,
  OWN_BYTES = BOXES * OWN_BOX_BYTES, /* of one warpgroup and one tensor */
  WALK_BYTES = BOXES * WALK_BOX_BYTES,
  STATISTICS_BYTES = WALK * 8, /* two floats a row */
  SCORES = WALK / 2,           /* floats of S and of dP a thread holds: 64 * WALK / 128 */
  OUTPUTS = HEAD_DIM / 2,      /* floats of a gradient a thread holds */
  FIRST_LOADER = (WARPGROUPS - 1) * WARPS_PER_GROUP,
  LOADERS = 2 + OWNS_KEYS,       /* warps: one for each walked tensor, and for the statistics of walked queries */
  SPARE = STAGES > 2,            /* 1: so many stages that one can be loaded a step later than it is free */
  DP_ALONE = DP_STAGES < STAGES, /* 1: the walked tile of dP has one place, taken again in the step that used it */
  AHEAD = WITH_DQ ? 8 : 0,       /* of walked queries: pairs of deltas that are loaded before they are needed */
  READS_AHEAD = SCORES <= 32,    /* 1: registers suffice to read those a step ahead */
  DS_BYTES = WARPGROUPS * ROWS * WALK * 2, /* dS of a step, as the product of dq reads it */
  BLOCK_BYTES = DQ_BLOCK_ROWS * DQ_BLOCK_COLUMNS * (int)sizeof(int32_t) /* of dq: a warp's share, see dq_sums.cuh */
};

enum { /* byte offsets from the 1024-aligned start */
       SHARED_OWN_S = 0,
       SHARED_OWN_DP = SHARED_OWN_S + WARPGROUPS * OWN_BYTES,
       SHARED_WALK_S = OWNED * WARPGROUPS * OWN_BYTES,
       SHARED_WALK_DP = SHARED_WALK_S + STAGES * WALK_BYTES,
       SHARED_DS = SHARED_WALK_DP + DP_STAGES * WALK_BYTES, /* two, in turn */
       SHARED_SHARES = SHARED_DS + WITH_DQ * 2 * DS_BYTES,
       SHARED_STATISTICS = SHARED_SHARES + WITH_DQ * WARPGROUPS * WARPS_PER_GROUP * BLOCK_BYTES,
       SHARED_BARRIERS = SHARED_STATISTICS + STAGES * STATISTICS_BYTES
};

enum mbarrier {                 /* byte offset from SHARED_BARRIERS */
                STAGE_FULL = 0, /* + 8 stage; one arrival of each loader; the first one is told of owned rows, too */
                DP_FULL = STAGE_FULL + 8 * STAGES, /* of that one place; the first time with owned rows */
                BARRIER_BYTES = DP_FULL + 8 * DP_ALONE
};

static_assert(DP_STAGES == STAGES || (DP_STAGES == 1 && STAGES == 2 && !WITH_P),
              "a tile of dP that is used twice, or asked for further ahead, needs a stage");
static_assert(DHP_BWD_ALIGN + SHARED_BARRIERS + BARRIER_BYTES == DHP_BWD_SHARED_BYTES(HEAD_DIM, TILE_K, WARPGROUPS,
                                                                                      ROWS, STAGES, OWNS_KEYS, WITH_DS,
                                                                                      WITH_P, WITH_DQ, DP_STAGES),
              "the host and the kernel disagree on the shared memory plan");

#endif
