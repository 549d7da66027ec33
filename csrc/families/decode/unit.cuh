/*
 * unit.cuh - what a cluster computes: which rows, over which key tiles.
 *
 * Key tiles are counted in the order of visits, from the last that a row of the unit sees to tile 0. Tile t of them has
 * its scores computed by one warp of the cluster, and is multiplied with v by every CTA, each with its own columns.
 * Before this header: the constants of the kernel.
 */
#ifndef DHP_DECODE_UNIT_CUH
#define DHP_DECODE_UNIT_CUH

#include "../../hopper/divisor.cuh"
#include "layout.cuh"

typedef struct unit {
  int rank;                  /* of this CTA in its cluster */
  int batch, head, key_head; /* head: the first of the head group */
  int row;                   /* first query row */
  int first_tile, tiles;     /* to visit, at least one */
  int place;                 /* of its parts */
} unit;

/* Returns this CTA's. CT: a function of the block index and public parameters. */
static __device__ __forceinline__ unit unit_of(const dhp_decode_params *p) {
  unit u;
  const int index = (int)(blockIdx.x / CLUSTER);
  u.rank = (int)(blockIdx.x % CLUSTER);
  const int group = quotient(index, p->by_q_tiles); /* of all batches */
  const int tile = index - group * p->q_tiles;
  u.place = group * p->q_tiles + p->q_tiles - 1 - tile;
  u.row = tile << p->log2_rows;
  u.batch = quotient(group, p->by_head_groups);
  const int in_batch = group - u.batch * p->head_groups, head_group = quotient(in_batch, p->by_splits);
  u.head = head_group * (ROWS >> p->log2_rows);
  u.key_head = quotient(u.head, p->by_heads_per_key_head);
  const int rows = 1 << p->log2_rows;
  const int seen_by_last = min(p->seqlen_k, u.row + rows + p->highest);
  const int begin = (in_batch - head_group * p->splits) * SEGMENT_TILES, seen = (seen_by_last + TILE_K - 1) / TILE_K;
  /* a unit that sees no key of its segment still visits a tile: of zeros, where there are no keys */
  u.first_tile = begin + (begin > 0 && seen <= begin ? DHP_NOT_SEEN_TILES : 0);
  /* with the zero, or the compiler would know how many at most, and leave out the remainder in group_full */
  u.tiles = max(min(seen - begin, SEGMENT_TILES + (int)p->zero), 1);
  return u;
}

/* Which tile is a warp's, of the TILES_PER_WARP that it computes scores of. */
static __device__ __forceinline__ int tile_of_warp(const unit *u, int warp, int nth) {
  return (nth * WARPS + warp) * CLUSTER + u->rank;
}

/* The first key of a tile. */
static __device__ __forceinline__ int first_key(const unit *u, int tile) {
  return (u->first_tile + u->tiles - 1 - tile) * TILE_K;
}

/* The place of a tile's probabilities, and of its two numbers a lane. */
static __device__ __forceinline__ uint32_t share_of(uint32_t base, int tile) {
  return base + SHARED_SHARES + tile * SHARE_BYTES;
}

/* The mbarrier of a tile's group. There are no more groups: the remainder only shows that no address is past the last.
 */
static __device__ __forceinline__ uint32_t group_full(uint32_t base, int tile) {
  return base + SHARED_BARRIERS + GROUP_FULL + 8 * ((uint32_t)tile / GROUP % GROUPS);
}

#endif
