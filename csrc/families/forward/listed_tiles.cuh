/*
 * listed_tiles.cuh - query tiles out of a list in device memory, in place of query_tiles.cuh: which of them a CTA
 * computes, and where the keys of a tile lie. Before this header: ROWS and TILE_K.
 *
 * Items, each a tile of the list for one head group, are dealt one after the other. A section of head groups comes
 * after the other, so that its keys, which have to come from device memory, are read again while they are in L2. The
 * list has the longest tiles first, and so has the last section; the one before it has the shortest first, and so on:
 * what a CTA has too much of one it has too little of the next. If there is one section, every other round is dealt
 * from the last CTA to the first. A tile's rows are of one sequence.
 */
#ifndef DHP_LISTED_TILES_CUH
#define DHP_LISTED_TILES_CUH

#include "../../hopper/divisor.cuh"
#include "../../hopper/ptx.cuh"
#include "../tiles/params.h"
#include "params.h"

/* What a warp keeps of one; the rest it reads again when it is needed. */
typedef struct query_tile {
  int item;      /* the place in the list times head groups, plus the head group */
  int last;      /* the key tile that is visited first, of one key segment */
  int key_tiles; /* to visit; 0 if there is no such query tile: then nothing else counts */
} query_tile;

/* The first head of its head group. */
static __device__ __forceinline__ int head_of(const dhp_fwd_params *p, const query_tile *tile) {
  return (tile->item - quotient(tile->item, p->by_head_groups) * p->head_groups) * (ROWS >> p->log2_rows);
}

static __device__ __forceinline__ int key_head_of(const dhp_fwd_params *p, const query_tile *tile) {
  return quotient(head_of(p, tile), p->by_heads_per_key_head);
}

/* Four numbers of its entry; the same in all lanes. */
static __device__ __forceinline__ void words_of_tile(int *words, const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                     const query_tile *tile, int part) {
  load_four((uint32_t *)words, (const int32_t *)(list->list->tiles + quotient(tile->item, p->by_head_groups)) + part);
}

/* Returns this CTA's nth query tile, with its keys of one segment: that of key tile `from`, or, if that is negative,
 * the last one that the query tile sees. CT: a function of the block index and of public parameters and lists. */
static __device__ __forceinline__ query_tile nth_query_tile(const dhp_fwd_params *p, const dhp_fwd_list *list, int nth,
                                                            int from) {
  const int cta = (int)blockIdx.x, ctas = (int)gridDim.x, section = list->section;
  const int count = load_word(&list->list->count), items = count * p->head_groups, of_section = max(count * section, 1);
  const int is_one = section == p->head_groups;
  const int item = nth * ctas + (is_one & nth & 1 ? ctas - 1 - cta : cta), there = max(min(item, items - 1), 0);
  const int nth_section = (int)((uint32_t)there / (uint32_t)of_section), rest = there - nth_section * of_section;
  const int follow = quotient(p->head_groups, list->by_section) - 1 - nth_section; /* sections after it */
  const int place = follow & 1 ? of_section - 1 - rest : rest;
  const int of_list = quotient(place, list->by_section);
  query_tile tile;
  tile.item = of_list * p->head_groups + nth_section * section + place - of_list * section;
  int loads[4];
  words_of_tile(loads, p, list, &tile, DHP_TILE_OF_LOADS);
  tile.last = from < 0 ? loads[2] : from;
  const int first = max(loads[2] - loads[3] + 1, tile.last & list->segment_of);
  tile.key_tiles = item < items ? tile.last - first + 1 : 0;
  return tile;
}

/* The last key tile of the segment that comes next in this query tile; negative: there is none. */
static __device__ __forceinline__ int next_segment(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                   const query_tile *tile) {
  int loads[4];
  words_of_tile(loads, p, list, tile, DHP_TILE_OF_LOADS);
  const int next = tile->last - tile->key_tiles;
  return next > loads[2] - loads[3] ? next : -1;
}

/* Whether this CTA has computed a segment of this query tile before. */
static __device__ __forceinline__ int resumes(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                              const query_tile *tile) {
  int loads[4];
  words_of_tile(loads, p, list, tile, DHP_TILE_OF_LOADS);
  return tile->last < loads[2];
}

/* How many keys of the tile that is visited first count; it may be more than all, or less than none. */
static __device__ __forceinline__ int keys_of_first(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                    const query_tile *tile) {
  int loads[4];
  words_of_tile(loads, p, list, tile, DHP_TILE_OF_LOADS);
  return loads[0] - tile->last * TILE_K;
}

/* Steps of earlier segments. */
static __device__ __forceinline__ int steps_before(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                   const query_tile *tile) {
  int loads[4];
  words_of_tile(loads, p, list, tile, DHP_TILE_OF_LOADS);
  return loads[2] - tile->last;
}

/* The steps before the first of these need the mask, and those from the second on; there may be less. */
static __device__ __forceinline__ int masked_steps(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                   const query_tile *tile) {
  int steps[4];
  words_of_tile(steps, p, list, tile, DHP_TILE_OF_STEPS);
  return steps[0] - steps_before(p, list, tile);
}
static __device__ __forceinline__ int plain_end(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                const query_tile *tile) {
  int steps[4];
  words_of_tile(steps, p, list, tile, DHP_TILE_OF_STEPS);
  return steps[1] - steps_before(p, list, tile);
}

/* Where the rows of a query tile end. */
static __device__ __forceinline__ int end_of_rows(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                  const query_tile *tile) {
  int rows[4];
  words_of_tile(rows, p, list, tile, DHP_TILE_OF_ROWS);
  return rows[1];
}

static __device__ __forceinline__ int first_row(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                const query_tile *tile) {
  int rows[4];
  words_of_tile(rows, p, list, tile, DHP_TILE_OF_ROWS);
  return rows[0];
}

static __device__ __forceinline__ int is_bad(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                             const query_tile *tile) {
  int steps[4];
  words_of_tile(steps, p, list, tile, DHP_TILE_OF_STEPS);
  return steps[2];
}

/* Whether its rows belong to no sequence. */
static __device__ __forceinline__ int is_of_none(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                 const query_tile *tile) {
  int steps[4];
  words_of_tile(steps, p, list, tile, DHP_TILE_OF_STEPS);
  return steps[3];
}

/* A row of a query tile. */
typedef struct query_row {
  int head, row;
  int last_key; /* that it sees; negative: none */
  int first_key;
} query_row;

/* Row r of those that a thread computes; `first` is the first one, among the rows of its warpgroup. */
static __device__ __forceinline__ query_row row_of_thread(const dhp_fwd_params *p, const dhp_fwd_list *list,
                                                          const query_tile *tile, int group, int first, int r) {
  const int of_group = first + 8 * r, in_tile = (group << p->log2_rows) + (of_group & ((1 << p->log2_rows) - 1));
  int loads[4], rows[4], steps[4];
  words_of_tile(loads, p, list, tile, DHP_TILE_OF_LOADS);
  words_of_tile(rows, p, list, tile, DHP_TILE_OF_ROWS);
  words_of_tile(steps, p, list, tile, DHP_TILE_OF_STEPS);
  query_row row;
  row.head = of_group >> p->log2_rows;
  row.row = rows[0] + in_tile;
  row.first_key = rows[3] + in_tile;
  const int last = min(rows[2] + in_tile, loads[0] - 1), none = steps[2] - 1; /* a bad row is not one that sees none */
  row.last_key = last < row.first_key ? none : max(last, none);
  return row;
}

#endif
