/*
 * turns.cuh - how the warpgroups of a CTA take turns at the tensor cores, and tell the last of them how far they are.
 *
 * A named barrier is a counter in hardware: who arrives goes on, who waits is suspended, and nobody polls. Before this
 * header: WARPGROUPS and STAGES. With one warpgroup nobody is met, and each of these is nothing.
 */
#ifndef DHP_TURNS_CUH
#define DHP_TURNS_CUH

#include "ptx.cuh"

enum {
  WARPGROUP_THREADS = 128,
  WARPS_PER_GROUP = 4,
  CTA_THREADS = WARPGROUPS * WARPGROUP_THREADS,
  TURN_THREADS = 2 * WARPGROUP_THREADS /* that meet at a turn: the warpgroup that takes it and the one that gives it */
};

enum named_barrier {                               /* 0 is __syncthreads */
                     TURN = 1,                     /* + warpgroup: its turn at the tensor cores */
                     FINISHED = TURN + WARPGROUPS, /* + stage of step t: all have finished step t-1 */
                     LOADED = FINISHED + STAGES,   /* + stage of step t, in the backward: its tile was asked for */
                     CLEARED = FINISHED + STAGES   /* + warpgroup, in the forward: its part of v has been cleared */
};

/* `turn` is TURN + the warpgroup whose turn it is. */
static __device__ __forceinline__ void take_turn(int turn) { bar_sync(WARPGROUPS > 1, turn, TURN_THREADS); }
/* If go. */
static __device__ __forceinline__ void give_turn(int go, int turn) {
  bar_arrive(WARPGROUPS > 1 && go, turn, TURN_THREADS);
}

#endif
