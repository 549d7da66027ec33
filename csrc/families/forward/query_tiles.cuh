/*
 * query_tiles.cuh - the device's half of the static schedule: which query tiles a CTA computes, one after another. The
 * host's half is schedule.c. Before this header: WARPGROUPS, ROWS, TILE_K, SEGMENT_TILES, ONE_SEGMENT, WINDOWED,
 * OWN_TILES, LEAVES_EARLY and HALF_TILES.
 *
 * Items are dealt to CTAs in rounds: first head groups in order, then a list.
 *
 * In order: all tiles of one head group after the other. Under a causal mask head groups go in twos, mirrored pairs,
 * and an item is two tiles: one of the first group, and its mirror image in the second; together they are equally long,
 * unless few keys or an offset cut the diagonal off. Half of the CTAs have the longer one first: so all tiles of a head
 * group are computed at a time, its keys come from device memory once, and every round brings as many new ones.
 *
 * The list, under a causal mask only: the remaining head groups, longest tiles first, head groups fastest. Every other
 * round is dealt from the last CTA to the first. Whole rounds of items in order would leave CTAs idle in the last one.
 *
 * A CTA goes through all key segments of a query tile; or, if segments are split, each is an item, in order: a head
 * group's segments one after the other, like head groups.
 */
#ifndef DHP_QUERY_TILES_CUH
#define DHP_QUERY_TILES_CUH

#include "../../hopper/divisor.cuh"
#include "../fold/params.h"
#include "params.h"

typedef struct query_tile {
  int batch, head, key_head; /* head: the first of the head group */
  int row;                   /* first query row */
  int last;                  /* the key tile that is visited first, of one key segment */
  int key_tiles;             /* to visit; 0 if there is no such query tile: then nothing else counts */
} query_tile;

/* How many keys the first row of a query tile sees, or of one of its warpgroups; negative: none. */
static __device__ __forceinline__ int seen_by_first(const dhp_fwd_params *p, int row, int group) {
  return min(p->seqlen_k, row + (group << p->log2_rows) + 1 + p->highest);
}
/* The last row of that warpgroup. */
static __device__ __forceinline__ int seen_by_last(const dhp_fwd_params *p, int row, int group) {
  return min(p->seqlen_k, row + ((group + 1) << p->log2_rows) + p->highest);
}

/* The last key tile that this warpgroup of a query tile sees, or a warpgroup before it; the first one if they see none.
 */
static __device__ __forceinline__ int top_tile(const dhp_fwd_params *p, int row, int group) {
  return max((seen_by_last(p, row, group) + TILE_K - 1) / TILE_K, 1) - 1;
}

/* The first key tile that a query tile sees; at most the last one. */
static __device__ __forceinline__ int bottom_tile(int row, int top, int lowest) {
  return WINDOWED ? min(max(row + lowest, 0) / TILE_K, top) : 0;
}

/*
 * Returns this CTA's nth query tile, with its keys of one segment: that of key tile `from`, or, if that is negative,
 * the last one that the query tile sees; if OWN_TILES, that this warpgroup of it sees. CT: a function of the block
 * index and public parameters.
 */
static __device__ __forceinline__ query_tile nth_query_tile(const dhp_fwd_params *p, int nth, int from, int group,
                                                            int lowest) {
  query_tile tile;
  const int rows = WARPGROUPS << p->log2_rows;
  const int cta = (int)blockIdx.x, ctas = (int)gridDim.x;
  const int ordered_rounds = p->ordered_rounds + (cta < p->ordered_rest), ordered_tiles = ordered_rounds << p->mirrored;
  const int in_order = nth < ordered_tiles;
  const int round = in_order ? nth >> p->mirrored : nth - ordered_tiles + ordered_rounds;
  const int second = in_order & p->mirrored & nth, reverse = in_order ? 0 : (round - p->ordered_rounds) & 1;
  const int item = round * ctas + (reverse ? ctas - 1 - cta : cta);
  const int index = max(min(item, p->items - 1) - (in_order ? 0 : p->ordered_items), 0);
  const dhp_divisor by = in_order ? p->by_q_tiles : p->by_listed_groups;
  const int whole = quotient(index, by), rest = index - whole * (in_order ? p->q_tiles : p->listed_groups);
  const int of_all = in_order ? (whole << p->mirrored) + second : p->batch * p->head_groups - p->listed_groups + rest;
  const int shorter = in_order ? rest : whole;
  const int along_q = second ? shorter : p->q_tiles - 1 - shorter;
  tile.batch = quotient(of_all, p->by_head_groups);
  const int in_batch = of_all - tile.batch * p->head_groups;
  const int head_group = ONE_SEGMENT ? in_batch : quotient(in_batch, p->by_splits);
  tile.head = head_group * (ROWS >> p->log2_rows);
  tile.key_head = quotient(tile.head, p->by_heads_per_key_head);
  tile.row = along_q * rows;

  const int top = top_tile(p, tile.row, OWN_TILES ? group : WARPGROUPS - 1);
  if (ONE_SEGMENT) {
    tile.last = top;
    tile.key_tiles = item < p->items ? top + 1 - bottom_tile(tile.row, top, lowest) : 0;
    return tile;
  }
  const int begin = (in_batch - head_group * p->splits) * SEGMENT_TILES; /* of its segment, if those are split */
  const int split = top < begin ? begin + DHP_NOT_SEEN_TILES : min(top, begin + SEGMENT_TILES - 1);
  tile.last = p->splits > 1 ? split : from < 0 ? top : from;
  tile.key_tiles = item < p->items ? tile.last % SEGMENT_TILES + 1 : 0;
  return tile;
}

/* The steps of this warpgroup, at least one: from the key tile where it begins to the first one that its rows see, if
 * LEAVES_EARLY, else that the query tile sees. */
static __device__ __forceinline__ int own_steps(const dhp_fwd_params *p, const query_tile *tile, int group,
                                                int lowest) {
  return LEAVES_EARLY ? tile->last + 1 - bottom_tile(tile->row + (group << p->log2_rows), tile->last, lowest)
                      : tile->key_tiles;
}

/* Whether this warpgroup sees only the first half of the key tile where it begins; and only the last half of the one
 * where it ends, if that is another. */
static __device__ __forceinline__ int begins_with_half(const dhp_fwd_params *p, const query_tile *tile, int group) {
  return HALF_TILES & (seen_by_last(p, tile->row, group) <= tile->last * TILE_K + TILE_K / 2);
}
static __device__ __forceinline__ int ends_with_half(const dhp_fwd_params *p, const query_tile *tile, int group,
                                                     int lowest) {
  const int steps = own_steps(p, tile, group, lowest), first_key = tile->row + (group << p->log2_rows) + lowest;
  return (HALF_TILES && WINDOWED) & (steps > 1) & (first_key >= (tile->last + 1 - steps) * TILE_K + TILE_K / 2);
}

/* The steps before the first of these need the mask, and those from the second on, which only a window has; there may
 * be less. */
static __device__ __forceinline__ int masked_steps(const dhp_fwd_params *p, const query_tile *tile, int group) {
  return tile->last + 1 - max(seen_by_first(p, tile->row, OWN_TILES ? group : 0), 0) / TILE_K;
}

static __device__ __forceinline__ int plain_end(const dhp_fwd_params *p, const query_tile *tile, int group,
                                                int lowest) {
  const int last_row = tile->row + (((OWN_TILES ? group : WARPGROUPS - 1) + 1) << p->log2_rows) - 1;
  return tile->last + 1 - (max(last_row + lowest, 0) + TILE_K - 1) / TILE_K;
}

/* So many steps of the query tile come before this warpgroup's first one. */
static __device__ __forceinline__ int steps_before(const dhp_fwd_params *p, const query_tile *tile) {
  return top_tile(p, tile->row, WARPGROUPS - 1) - tile->last;
}

/* Whether this CTA has computed a segment of this query tile before. */
static __device__ __forceinline__ int resumes(const dhp_fwd_params *p, const query_tile *tile) {
  return (p->splits == 1) & (tile->last < top_tile(p, tile->row, WARPGROUPS - 1));
}

/* The last key tile of the segment that comes next in this query tile; negative: there is none. */
static __device__ __forceinline__ int next_segment(const dhp_fwd_params *p, const query_tile *tile) {
  return p->splits > 1 ? -1 : tile->last - tile->key_tiles;
}

/* A row of a query tile. */
typedef struct query_row {
  int head, row;
  int last_key; /* that it sees; negative: none */
#if WINDOWED
  int first_key;
#endif
} query_row;

/* Row r of those that a thread computes; `first` is the first one, among the rows of its warpgroup. */
static __device__ __forceinline__ query_row row_of_thread(const dhp_fwd_params *p, const query_tile *tile, int group,
                                                          int first, int r, int lowest) {
  const int of_group = first + 8 * r;
  query_row row;
  row.head = of_group >> p->log2_rows;
  row.row = tile->row + (group << p->log2_rows) + (of_group & ((1 << p->log2_rows) - 1));
  row.last_key = min(row.row + p->highest, p->seqlen_k - 1);
#if WINDOWED
  row.first_key = row.row + lowest;
  row.last_key = row.last_key < row.first_key ? -1 : row.last_key;
#else
  (void)lowest;
#endif
  return row;
}

#endif
