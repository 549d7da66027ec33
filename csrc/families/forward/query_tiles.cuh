/*
 * query_tiles.cuh - the device's half of the static schedule: which query tiles a CTA computes, one after another. The
 * host's half is schedule.c. Before this header: WARPGROUPS, ROWS, TILE_K and SEAMLESS.
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
 */
#ifndef DHP_QUERY_TILES_CUH
#define DHP_QUERY_TILES_CUH

#include "../../hopper/divisor.cuh"
#include "params.h"

typedef struct query_tile {
  int batch, head, key_head; /* head: the first of the head group */
  int row;                   /* first query row */
  int key_tiles;             /* to visit; 0 if there is no such query tile: then nothing else counts */
  int masked;                /* how many of them need the mask: the first ones visited */
} query_tile;

/* Returns this CTA's nth query tile. CT: a function of the block index and public parameters. */
static __device__ __forceinline__ query_tile nth_query_tile(const dhp_fwd_params *p, int nth) {
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
  const int group =
      in_order ? (whole << p->mirrored) + second : p->batch * p->head_groups - p->listed_groups + rest; /* of all */
  const int shorter = in_order ? rest : whole;
  const int along_q = second ? shorter : p->q_tiles - 1 - shorter;
  tile.batch = quotient(group, p->by_head_groups);
  tile.head = (group - tile.batch * p->head_groups) * (ROWS >> p->log2_rows);
  tile.key_head = quotient(tile.head, p->by_heads_per_key_head);
  tile.row = along_q * rows;

  const int seen_by_last = p->is_causal ? min(p->seqlen_k, tile.row + rows + p->causal_offset) : p->seqlen_k;
  const int seen_by_first = p->is_causal ? min(p->seqlen_k, tile.row + 1 + p->causal_offset) : p->seqlen_k;
  const int key_tiles = max((seen_by_last + TILE_K - 1) / TILE_K, 1);
  tile.masked = key_tiles - max(seen_by_first, 0) / TILE_K;
  tile.key_tiles = item < p->items ? key_tiles : 0;
  return tile;
}

/* A tile of keys: where it begins, in k and in v. */
typedef struct key_tile {
  int key, key_head, batch;
} key_tile;

/* The one that is visited in a step of a query tile: from the last one on. */
static __device__ __forceinline__ key_tile key_tile_of(const query_tile *tile, int step) {
  const key_tile visited = {(tile->key_tiles - 1 - step) * TILE_K, tile->key_head, tile->batch};
  return visited;
}

/* A row of a query tile. */
typedef struct query_row {
  int head, row;
  int last_key; /* that it sees; negative: none */
} query_row;

/* Row r of those that a thread computes; `first` is the first one, among the rows of its warpgroup. */
static __device__ __forceinline__ query_row row_of_thread(const dhp_fwd_params *p, const query_tile *tile, int group,
                                                          int first, int r) {
  const int of_group = first + 8 * r;
  query_row row;
  row.head = of_group >> p->log2_rows;
  row.row = tile->row + (group << p->log2_rows) + (of_group & ((1 << p->log2_rows) - 1));
  /* one select around min is a branch, which is better than two selects unless products are under way */
  const int last = p->seqlen_k - 1;
  row.last_key = p->is_causal || SEAMLESS ? min(row.row + (p->is_causal ? p->causal_offset : p->seqlen_k), last) : last;
  return row;
}

#endif
