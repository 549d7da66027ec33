/*
 * walk.cuh - what a CTA owns and in which order it walks the other side. Functions of the CTA's number and of public
 * parameters. Before this header: layout.cuh.
 *
 * Owned keys: all query heads of the key head, one after the other, and of each the tiles of queries from the first one
 * that sees a key of the CTA to the last. Owned queries: the tiles of keys from the last visible one to the first.
 * Tiles are counted from row 0, so the order of every sum is fixed by positions alone. Tiles that need the mask come
 * first.
 */
#ifndef DHP_BACKWARD_WALK_CUH
#define DHP_BACKWARD_WALK_CUH

#include "../../hopper/divisor.cuh"
#include "layout.cuh"

typedef struct walk {
  int batch, own_head, own_row; /* own_row: the first of the CTA */
  int head, heads;              /* walked heads: the first, how many */
  int start;                    /* first tile */
  int tiles, masked;            /* of one head: how many, and how many of them, the first ones, need the mask */
} walk;

/* The way along a head. */
enum { FORWARDS = OWNS_KEYS ? 1 : -1 };

static __device__ __forceinline__ int tiles_of(int rows) { return (rows + WALK - 1) / WALK; }

/*
 * Heads in order: the CTAs of a head are neighbours, those with the longest walks first; so few heads are walked at a
 * time, which stay in the L2 cache. The list: of the last heads the longest walks of all come first, so that the last
 * CTAs to start are the shortest. Else multiprocessors would wait for the long ones of the last head.
 */
static __device__ __forceinline__ walk walk_of(const dhp_bwd_params *p, int cta) {
  walk w;
  const int ordered = p->ordered_heads * p->own_tiles, in_order = cta < ordered;
  const int index = in_order ? cta : cta - ordered;
  const int whole = quotient(index, in_order ? p->by_own_tiles : p->by_listed_heads);
  const int rest = index - whole * (in_order ? p->own_tiles : p->listed_heads);
  const int head_of_all = in_order ? whole : p->ordered_heads + rest, nth = in_order ? rest : whole;
  w.batch = quotient(head_of_all, p->by_own_heads);
  w.own_head = head_of_all - w.batch * p->own_heads;
  w.own_row = (OWNS_KEYS ? nth : p->own_tiles - 1 - nth) * (WARPGROUPS * ROWS);
  const int last_own = min(w.own_row + WARPGROUPS * ROWS, p->own_rows) - 1;
  if (OWNS_KEYS) {
    w.heads = p->heads_per_key_head;
    w.head = w.own_head * w.heads;
    const int first_seeing = p->is_causal ? max(w.own_row - p->causal_offset, 0) : 0;
    const int all_see_from = p->is_causal ? max(last_own - p->causal_offset, 0) : 0; /* from this query on, all keys */
    const int used = w.own_row < p->seqlen_k;
    w.start = first_seeing / WALK;
    w.tiles = used ? max(tiles_of(p->seqlen_q) - w.start, 0) : 0;
    w.masked = max(min(tiles_of(all_see_from) - w.start, w.tiles), 0);
  } else {
    w.heads = 1;
    w.head = quotient(w.own_head, p->by_heads_per_key_head);
    const int seen_by_last = p->is_causal ? min(last_own + p->causal_offset + 1, p->seqlen_k) : p->seqlen_k;
    const int seen_by_all = p->is_causal ? min(w.own_row + p->causal_offset + 1, p->seqlen_k) : p->seqlen_k;
    w.tiles = tiles_of(max(seen_by_last, 0));
    w.masked = w.tiles - max(seen_by_all, 0) / WALK;
    w.start = w.tiles - 1;
  }
  return w;
}

/* A step of the walk. */
typedef struct place {
  int head, tile; /* counted from the first of each */
} place;

static __device__ __forceinline__ place place_after(const walk *w, place at) {
  const int ends = at.tile + 1 == w->tiles;
  const place after = {at.head + ends, ends ? 0 : at.tile + 1};
  return after;
}

static __device__ __forceinline__ int first_row(const walk *w, place at) {
  return (w->start + FORWARDS * at.tile) * WALK;
}

#endif
