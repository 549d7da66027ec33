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

#include <stddef.h>

#include "../../hopper/divisor.cuh"
#include "../../hopper/ptx.cuh"
#include "../tiles/params.h"
#include "params.h"

/*
 * What a warp keeps of one. Of its entry each lane has a word, and a lane behind those its head group: one load and one
 * register, where reading members again from memory took hundreds of cycles of each query tile.
 */
typedef struct query_tile {
  int last;      /* the key tile that is visited first, of one key segment */
  int key_tiles; /* to visit; 0 if there is no such query tile: then nothing else counts */
  int key_row;   /* of the key tile that is visited first; if keys are in no pages */
  int key_head;
  int word; /* this lane's */
} query_tile;

enum { LANE_OF_HEAD_GROUP = DHP_TILE_WORDS };

static_assert(sizeof(dhp_listed_tile) == 4 * DHP_TILE_WORDS && LANE_OF_HEAD_GROUP < 32, "each word has a lane");

/* Loads this lane's word of a tile of the list, for one head group. */
static __device__ __forceinline__ int word_of_lane(const dhp_fwd_list *list, int tile, int head_group) {
  const int lane = (int)threadIdx.x % 32;
  const int word = load_word((const int32_t *)(list->list + tile) + min(lane, DHP_TILE_WORDS - 1));
  return lane < LANE_OF_HEAD_GROUP ? word : head_group;
}

/* That of another lane. All lanes come here together, and get the same. */
static __device__ __forceinline__ int word_of(int word, int lane) { return __shfl_sync(FULL_MASK, word, lane); }

/* A member of the entry, out of a word or a query tile. */
#define OF_WORD(word, member) word_of(word, offsetof(dhp_listed_tile, member) / 4)
#define OF_ENTRY(tile, member) OF_WORD((tile)->word, member)

/* The first head of its head group. */
static __device__ __forceinline__ int head_of(const dhp_fwd_params *p, const query_tile *tile) {
  return word_of(tile->word, LANE_OF_HEAD_GROUP) * (ROWS >> p->log2_rows);
}

/*
 * Returns this CTA's nth query tile, with its keys of one segment: that of key tile `from`, or, if that is negative,
 * the last one that the query tile sees; `word` is the lane's of any tile of the list. CT: a function of the block
 * index and of public parameters and lists.
 */
static __device__ __forceinline__ query_tile nth_query_tile(const dhp_fwd_params *p, const dhp_fwd_list *list, int word,
                                                            int nth, int from) {
  const int cta = (int)blockIdx.x, ctas = (int)gridDim.x, section = list->section;
  const int count = OF_WORD(word, count), items = count * p->head_groups;
  const dhp_divisor by_count = {(uint32_t)OF_WORD(word, by_count.multiplier), (uint32_t)OF_WORD(word, by_count.shift)};
  const int is_one = section == p->head_groups;
  const int item = nth * ctas + (is_one & nth & 1 ? ctas - 1 - cta : cta), there = max(min(item, items - 1), 0);
  const int nth_section = quotient(quotient(there, by_count), list->by_section), of_section = max(count * section, 1);
  const int rest = there - nth_section * of_section;
  const int follow = quotient(p->head_groups, list->by_section) - 1 - nth_section; /* sections after it */
  const int place = follow & 1 ? of_section - 1 - rest : rest;
  const int of_list = quotient(place, list->by_section);
  query_tile tile;
  tile.word = word_of_lane(list, of_list, nth_section * section + place - of_list * section);
  const int last = OF_ENTRY(&tile, last_tile);
  tile.last = from < 0 ? last : from;
  const int first = max(last - OF_ENTRY(&tile, key_tiles) + 1, tile.last & list->segment_of);
  tile.key_tiles = item < items ? tile.last - first + 1 : 0;
  tile.key_row = OF_ENTRY(&tile, key_row) + tile.last * TILE_K;
  tile.key_head = quotient(head_of(p, &tile), p->by_heads_per_key_head);
  return tile;
}

/* The last key tile of the segment that comes next in this query tile; negative: there is none. */
static __device__ __forceinline__ int next_segment(const query_tile *tile) {
  const int next = tile->last - tile->key_tiles;
  return next > OF_ENTRY(tile, last_tile) - OF_ENTRY(tile, key_tiles) ? next : -1;
}

/* Steps of earlier segments. */
static __device__ __forceinline__ int steps_before(const query_tile *tile) {
  return OF_ENTRY(tile, last_tile) - tile->last;
}

/* Whether this CTA has computed a segment of this query tile before. */
static __device__ __forceinline__ int resumes(const query_tile *tile) { return steps_before(tile) > 0; }

/* How many keys of the tile that is visited first count; it may be more than all, or less than none. */
static __device__ __forceinline__ int keys_of_first(const query_tile *tile) {
  return OF_ENTRY(tile, keys) - tile->last * TILE_K;
}

/* The steps before the first of these need the mask, and those from the second on; there may be less. */
static __device__ __forceinline__ int masked_steps(const query_tile *tile) {
  return OF_ENTRY(tile, masked) - steps_before(tile);
}
static __device__ __forceinline__ int plain_end(const query_tile *tile) {
  return OF_ENTRY(tile, plain_end) - steps_before(tile);
}

/* A row of a query tile. */
typedef struct query_row {
  int head, row;
  int last_key; /* that it sees; negative: none */
  int first_key;
} query_row;

/* Row r of those that a thread computes; `first` is the first one, among the rows of its warpgroup. */
static __device__ __forceinline__ query_row row_of_thread(const dhp_fwd_params *p, const query_tile *tile, int group,
                                                          int first, int r) {
  const int of_group = first + 8 * r, in_tile = (group << p->log2_rows) + (of_group & ((1 << p->log2_rows) - 1));
  query_row row;
  row.head = of_group >> p->log2_rows;
  row.row = OF_ENTRY(tile, row) + in_tile;
  row.first_key = OF_ENTRY(tile, first_key) + in_tile;
  const int last = min(OF_ENTRY(tile, last_key) + in_tile, OF_ENTRY(tile, keys) - 1);
  const int none = OF_ENTRY(tile, is_bad) - 1; /* a bad row is not one that sees none */
  row.last_key = last < row.first_key ? none : max(last, none);
  return row;
}

#endif
