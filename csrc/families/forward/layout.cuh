/*
 * layout.cuh - the constants of one forward kernel, and what lies where in its shared memory.
 *
 * HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, CTAS_PER_SM, SEGMENT_TILES, ONE_SEGMENT, LISTED, WINDOWED and Q_PLACES
 * come from family.py.
 */
#ifndef DHP_FORWARD_LAYOUT_CUH
#define DHP_FORWARD_LAYOUT_CUH

/* Waits name a phase by its barrier's state (ptx.cuh) where that was measured to gain: not at head_dim 64 without a
 * list or window where the GPU is full, not at 128 for rows of one segment, and with a window not for 32 rows either.
 */
#define WAITS_BY_STATE                              \
  (LISTED           ? 1                             \
   : WINDOWED       ? ROWS == 64 && HEAD_DIM != 128 \
   : HEAD_DIM == 64 ? ROWS == 32                    \
                    : HEAD_DIM == 256 || WARPGROUPS == 1 || !ONE_SEGMENT)
#include "../../hopper/stages.cuh"
#include "../../hopper/turns.cuh"
#include "params.h"

typedef dhp_fwd_params kernel_params;

/*
 * q stays in registers for as long as its query tile: S = q k^T then reads k alone from shared memory, and takes no
 * descriptors of q, two uniform registers each. Only here are there registers for it. family.py has to know.
 */
#define Q_IN_REGISTERS (HEAD_DIM == 128 && WARPGROUPS == 2)

/* The last P v of a query tile is issued together with S(0) of the next one: its q comes before this tile has ended. */
#define SEAMLESS Q_IN_REGISTERS

/*
 * A warpgroup begins a query tile with the last key tile that its own rows see: steps before that are those of others.
 * If SEAMLESS the last step of one query tile is the first of the next. Of longer rows it would be too small a part,
 * and with a list nothing was gained.
 */
#define OWN_TILES (ONE_SEGMENT && WARPGROUPS > 1 && !SEAMLESS)

/* And it ends with the first one that they see, which only a window has: others' first key tiles come after that. With
 * two stages, at head_dim 256, nothing was gained. */
#define LEAVES_EARLY (OWN_TILES && WINDOWED && STAGES > 2)

/*
 * Of the last key tile that a warpgroup's rows see they may see the first half only, and within a window of the first
 * one the last half. Then there is no softmax of the other half: at head_dim 64 exponentials are what a step waits for.
 */
#define HALF_TILES (HEAD_DIM == 64 && ONE_SEGMENT)

/* Of a key tile, what a softmax is over. */
typedef enum part_of_tile { WHOLE, FIRST_HALF, LAST_HALF } part_of_tile;

enum {
  BOXES = HEAD_DIM / BOX_COLUMNS, /* 64-column boxes along head_dim */
  Q_BOX_BYTES = ROWS * ROW_BYTES,
  KV_BOX_BYTES = TILE_K * ROW_BYTES,
  Q_BYTES = BOXES * Q_BOX_BYTES, /* of one warpgroup */
  KV_BYTES = BOXES * KV_BOX_BYTES,
  SCORES = TILE_K / 2,     /* floats of S a thread holds: 64 * TILE_K / 128 */
  OUTPUTS = HEAD_DIM / 2,  /* floats of O a thread holds */
  THREAD_ROWS = ROWS / 32, /* rows that a thread computes, of the two that wgmma gives it */
  FIRST_LOADER = (WARPGROUPS - 1) * WARPS_PER_GROUP,
  LOADS = BOXES > 2 ? BOXES / 2 : 1, /* boxes that a loader asks for at a time, so that four warps at most load */
  LOADERS = BOXES / LOADS            /* of k; as many of v */
};

enum { /* byte offsets from the 1024-aligned start */
       SHARED_Q = 0,
       SHARED_K = SHARED_Q + Q_PLACES * WARPGROUPS * Q_BYTES,
       SHARED_V = SHARED_K + STAGES * KV_BYTES,
       SHARED_BARRIERS = SHARED_V + STAGES * KV_BYTES
};

static_assert(Q_PLACES == 1 || (HEAD_DIM <= 128 && !Q_IN_REGISTERS), "these read q in its first place only");

static_assert(DHP_SHARED_ALIGN + SHARED_BARRIERS <= 1 << 18 && KV_BOX_BYTES <= 1 << 18, "in a descriptor's fields");

enum mbarrier {             /* byte offset of the first 8-byte mbarrier of a kind, from SHARED_BARRIERS */
                Q_FULL = 0, /* + 8 warpgroup */
                PAIR_FULL = Q_FULL + 8 * WARPGROUPS, /* + 8 stage */
                BARRIER_BYTES = PAIR_FULL + 8 * STAGES
};

static_assert(DHP_SHARED_ALIGN + SHARED_BARRIERS + BARRIER_BYTES ==
                  DHP_FWD_SHARED_BYTES(HEAD_DIM, TILE_K, WARPGROUPS, ROWS, STAGES, LISTED, WINDOWED, FORM, Q_PLACES),
              "the host and the kernel disagree on the shared memory plan");

#endif
