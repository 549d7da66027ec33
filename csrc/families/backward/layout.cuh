/*
 * layout.cuh - the constants of one backward kernel, and what lies where in its shared memory.
 *
 * HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, CTAS_PER_SM, OWNS_KEYS, WITH_DS and WITH_P come from family.py.
 */
#ifndef DHP_BACKWARD_LAYOUT_CUH
#define DHP_BACKWARD_LAYOUT_CUH

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
  LOADERS = 2,       /* warps: one for each walked tensor */
  SPARE = STAGES > 2 /* 1: so many stages that one can be loaded a step later than it is free */
};

enum { /* byte offsets from the 1024-aligned start */
       SHARED_OWN_S = 0,
       SHARED_OWN_DP = SHARED_OWN_S + WARPGROUPS * OWN_BYTES,
       SHARED_WALK_S = OWNED * WARPGROUPS * OWN_BYTES,
       SHARED_WALK_DP = SHARED_WALK_S + STAGES * WALK_BYTES,
       SHARED_STATISTICS = SHARED_WALK_DP + STAGES * WALK_BYTES,
       SHARED_BARRIERS = SHARED_STATISTICS + STAGES * STATISTICS_BYTES
};

enum mbarrier {                 /* byte offset from SHARED_BARRIERS */
                OWN_FULL = 0,   /* one arrival of each warpgroup */
                STAGE_FULL = 8, /* + 8 stage; one arrival of each loader */
                BARRIER_BYTES = STAGE_FULL + 8 * STAGES
};

static_assert(DHP_BWD_ALIGN + SHARED_BARRIERS + BARRIER_BYTES ==
                  DHP_BWD_SHARED_BYTES(HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, OWNS_KEYS, WITH_DS, WITH_P),
              "the host and the kernel disagree on the shared memory plan");

#endif
