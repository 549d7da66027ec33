/*
 * stages.cuh - the ring of stages that a CTA's stream of tiles goes through, and how a warp asks TMA for its part.
 *
 * A stage is a place in shared memory for the tiles that one step needs, with one mbarrier that completes when they
 * have arrived. Before this header: STAGES, how many there are.
 */
#ifndef DHP_STAGES_CUH
#define DHP_STAGES_CUH

#include "ptx.cuh"

enum {
  BOX_COLUMNS = 64,           /* of one TMA box: 64 elements of 16 bits are the 128 bytes of the swizzle */
  ROW_BYTES = BOX_COLUMNS * 2 /* one row of one box */
};

/* A stage, and the phase of its barrier in this round of the ring. */
typedef struct stage {
  int index;
  uint32_t phase;
} stage;

static __device__ __forceinline__ int index_after(int index) { return index + 1 == STAGES ? 0 : index + 1; }
static __device__ __forceinline__ int index_before(int index) { return index == 0 ? STAGES - 1 : index - 1; }

static __device__ __forceinline__ stage stage_after(stage at) {
  const int index = index_after(at.index);
  const stage after = {index, at.phase ^ PHASE(index == 0)};
  return after;
}

/* How a box is asked for: tma_load, or tma_load_once. */
typedef void box_load(int go, uint32_t destination, const CUtensorMap *map, uint32_t full, int column, int row,
                      int head, int batch);

/*
 * If go: asks for `boxes` boxes of 64 columns next to each other, from (column, row) of a head on. They complete on
 * `full`, which the warp has told before how many bytes to expect.
 */
template <box_load *load = tma_load>
static __device__ __forceinline__ void load_boxes(int go, uint32_t destination, const CUtensorMap *map, uint32_t full,
                                                  int boxes, int box_bytes, int column, int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < boxes; box++)
    load(go, destination + box * box_bytes, map, full, column + box * BOX_COLUMNS, row, head, batch);
}

/* If go: announces them, too, the boxes being all that this warp brings in this phase. */
template <int boxes>
static __device__ __forceinline__ void load_announced(int go, uint32_t destination, int box_bytes,
                                                      const CUtensorMap *map, uint32_t full, int column, int row,
                                                      int head, int batch) {
  if (boxes == 1)
    tma_load_announced(go, destination, map, full, box_bytes, column, row, head, batch);
  else
    tma_load_two_announced(go, destination, destination + box_bytes, map, full, 2 * box_bytes, column,
                           column + BOX_COLUMNS, row, head, batch);
}

#endif
