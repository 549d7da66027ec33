/*
 * layout.cuh - the constants of one decode kernel, and what lies where in the shared memory of its CTAs.
 *
 * HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, CTAS_PER_SM, SEGMENT_TILES, TILES_PER_WARP and STRIP come from
 * family.py.
 */
#ifndef DHP_DECODE_LAYOUT_CUH
#define DHP_DECODE_LAYOUT_CUH

#include "../../hopper/stages.cuh"
#include "../../hopper/turns.cuh"
#include "params.h"

typedef dhp_decode_params kernel_params;

enum {
  WARPS = WARPGROUPS * WARPS_PER_GROUP,
  CLUSTER = HEAD_DIM / STRIP,                 /* CTAs */
  TILES = CLUSTER * WARPS * TILES_PER_WARP,   /* key tiles that a cluster has room for, numbered as they are visited */
  GROUP = 4,                                  /* key tiles whose strips of v come and go together */
  STRIPS_PER_BOX = STAGES * GROUP / WARPS,    /* of v, which take the place of a box of k */
  K_COLUMNS = STRIPS_PER_BOX * STRIP,         /* of such a box */
  BOXES = HEAD_DIM / K_COLUMNS,               /* along head_dim */
  K_LOADS = TILES_PER_WARP * BOXES,           /* of a warp, one after another into the same place */
  STEPS = TILE_K / 16,                        /* of P v, 16 keys each */
  GROUPS = TILES / GROUP,                     /* of them STAGES have a place at a time */
  OUTPUT_WARPS = STRIP / 8,                   /* warps that multiply P and v, eight columns each: the first ones */
  LOADER = OUTPUT_WARPS,                      /* the warp that asks for strips of v meanwhile */
  GROUP_THREADS = (OUTPUT_WARPS + 1) * 32,    /* that meet where a group's places become free */
  OWN_BARRIER = FINISHED + STAGES,            /* + warp: a named barrier of its own */
  TOP_COPIES = CLUSTER < 4 ? 4 / CLUSTER : 1, /* of a tile's highest scores that a CTA gets */
  SCORES = TILE_K / 2,                        /* floats of S a thread holds, of one tile; half of them are used */
  THREAD_ROWS = 1,                            /* rows that a thread computes, of the two that mma gives it */
  OUTPUTS = 4                                 /* floats of O a thread holds, likewise */
};

enum {
  K_ROW_BYTES = K_COLUMNS * 2,
  BOX_BYTES = TILE_K * K_ROW_BYTES, /* of k */
  STRIP_ROW_BYTES = STRIP * 2,
  STRIP_BYTES = TILE_K * STRIP_ROW_BYTES,
  STEP_BYTES = 32 * 8,          /* of packed probabilities: two words a lane */
  P_BYTES = STEPS * STEP_BYTES, /* of a tile */
  LANES_BYTES = 32 * 8,         /* of a tile: two floats a lane, what rescales the sums before, and its own sum */
  SHARE_BYTES = P_BYTES + LANES_BYTES
};

enum {                                                    /* byte offsets from the 1024-aligned start */
       SHARED_BOXES = 0,                                  /* of each warp a box of k, later strips of v */
       SHARED_SHARES = SHARED_BOXES + WARPS * BOX_BYTES,  /* of each tile the packed probabilities, and of each lane */
       SHARED_TOPS = SHARED_SHARES + TILES * SHARE_BYTES, /* of each tile the highest score of each row */
       SHARED_POISON = SHARED_TOPS + TILES * ROWS * 4,    /* of each warp of the cluster: NaN if it waited in vain */
       SHARED_BARRIERS = SHARED_POISON + CLUSTER * WARPS * 4
};

enum mbarrier { /* byte offset of the first 8-byte mbarrier of a kind, from SHARED_BARRIERS; each has one phase */
                K_FULL = 0,                                /* + 8 (warp K_LOADS + load) */
                GROUP_FULL = K_FULL + 8 * WARPS * K_LOADS, /* + 8 group: strips of v, and what all CTAs tell of P */
                TOPS_FULL = GROUP_FULL + 8 * GROUPS,       /* of all tiles */
                POISON_FULL = TOPS_FULL + 8,
                BARRIER_BYTES = POISON_FULL + 8
};

static_assert(DHP_DECODE_ALIGN + SHARED_BARRIERS + BARRIER_BYTES ==
                  DHP_DECODE_SHARED_BYTES(HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, TILES_PER_WARP, STRIP),
              "the host and the kernel disagree on the shared memory plan");
static_assert(TILES >= SEGMENT_TILES && ROWS == DHP_DECODE_ROWS, "or on what a cluster has room for");
static_assert(STAGES * GROUP % WARPS == 0 && HEAD_DIM % K_COLUMNS == 0 && K_COLUMNS % 32 == 0 && K_COLUMNS <= 64,
              "strips of v take the places of k, which are as wide as a swizzle");
static_assert(OWN_BARRIER + WARPS <= 16, "named barriers");
static_assert(GROUPS % WARPS == 0, "each warp prepares as many");
static_assert(GROUP % CLUSTER == 0 || CLUSTER % GROUP == 0, "whose tiles a group's are");
static_assert(SHARED_SHARES % 16 == 0 && SHARE_BYTES % 16 == 0, "what TMA copies");
static_assert(WARPS > LOADER && WARPS * STRIPS_PER_BOX % GROUP == 0, "a group's places are those of whole warps");

#endif
