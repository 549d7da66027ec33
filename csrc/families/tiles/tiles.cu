/*
 * tiles.cu - the query tiles of packed sequences as a list, longest first, out of lengths in device memory.
 *
 * One warp finds one tile: which sequence it belongs to, which keys it sees, and its place in the list, which is the
 * number of tiles that come before it. Under a mask the tiles of a sequence never get shorter towards its end, so how
 * many of them exceed a length takes one division; each lane counts over its share of the sequences. So there is no
 * sort and no memory between warps, and a list follows from its lengths alone.
 *
 * What a caller on the host would be refused is contained here. Lengths of q that do not ascend, or exceed the tensor:
 * all rows are bad. Of a sequence's keys, or a page that does not exist: the rows of that sequence are.
 *
 * CT: reads lengths and page tables, which are public, and nothing else.
 */
#include "../../hopper/divisor.cuh"
#include "../../hopper/ptx.cuh"
#include "params.h"

enum { WARPS = WARPGROUPS * 4, LANES = 32, FIRST_STEP = 1, LAST_STEP = 16 /* of a tree over the lanes */ };

static __device__ __forceinline__ int sum_of_lanes(int x) {
#pragma unroll
  for (int step = FIRST_STEP; step <= LAST_STEP; step *= 2)
    x += __shfl_xor_sync(FULL_MASK, x, step);
  return x;
}

/* Of the lanes before this one. */
static __device__ __forceinline__ int sum_before(int x, int lane) {
  int sum = x;
#pragma unroll
  for (int step = FIRST_STEP; step <= LAST_STEP; step *= 2) {
    const int below = __shfl_up_sync(FULL_MASK, sum, step);
    sum += lane >= step ? below : 0;
  }
  return sum - x;
}

static __device__ __forceinline__ int clamped(int x, int low, int high) { return max(low, min(x, high)); }

static __device__ __forceinline__ int round_up(int n, dhp_divisor by, int d) { return quotient(n + d - 1, by); }

/* A sequence: its rows, its keys that count, and the band of key - query that it sees. */
typedef struct sequence {
  int row, queries, tiles;
  int key_row, keys, is_bad;
  int lowest, highest;
} sequence;

/* One of two public numbers, without a branch: lanes would part. */
static __device__ __forceinline__ int choose(int first, int a, int b) { return b ^ ((a ^ b) & -first); }

/*
 * Sequence b; the one behind the last has the rows that belong to none, and no key. If q_is_bad, it has all rows. Loads
 * are of a sequence that there is, in any case.
 */
static __device__ __forceinline__ sequence sequence_at(const dhp_tiles_params *p, int b, int q_is_bad) {
  sequence s;
  const int is_one = b < p->sequences, there = choose(is_one, b, 0);
  const int begin = load_word(p->cu_seqlens_q + min(b, p->sequences));
  const int end = choose(is_one, load_word(p->cu_seqlens_q + min(b + 1, p->sequences)), p->tokens_q);
  s.row = choose(q_is_bad, 0, begin);
  s.queries = choose(q_is_bad, choose(is_one, 0, p->tokens_q), end - begin);
  s.tiles = round_up(s.queries, p->by_rows, p->rows);

  int room = p->room, first = 0;
  s.is_bad = 0;
  if (!p->page_table) {
    first = load_word(p->cu_seqlens_k + there);
    const int last = load_word(p->cu_seqlens_k + there + is_one);
    s.is_bad = (first < 0) | (last < first) | (last > p->tokens_k);
    room = choose(s.is_bad, 0, last - first);
  }
  const int used = p->seqused_k ? load_word(p->seqused_k + there) : room;
  const int pad = p->leftpad_k ? load_word(p->leftpad_k + there) : 0;
  s.is_bad |= (used < 0) | (used > room) | (used > p->most_k) | (pad < 0) | (pad > used);
  s.is_bad = choose(is_one, s.is_bad, q_is_bad);
  const int has_keys = is_one & !s.is_bad;
  s.keys = choose(has_keys, used - pad, 0);
  s.key_row = choose(has_keys, first + pad, 0);
  const int offset = p->is_bottom_right ? s.keys - s.queries : 0;
  s.lowest = p->left < DHP_TILES_FAR ? max(offset - p->left, -DHP_TILES_FAR) : -DHP_TILES_FAR;
  s.highest = p->right < DHP_TILES_FAR ? min(offset + p->right, DHP_TILES_FAR) : DHP_TILES_FAR;
  return s;
}

/* Key tiles up to the last one that a query tile sees, at least one; no more than a window has, so that in a sequence
 * this never falls. */
static __device__ __forceinline__ int length_of(const dhp_tiles_params *p, const sequence *s, int tile) {
  const int last_query = min((tile + 1) * p->rows, s->queries) - 1;
  const int end = clamped(last_query + s->highest + 1, 0, s->keys);
  return clamped(round_up(end, p->by_tile_k, p->tile_k), 1, p->most_tiles);
}

/* How many tiles of a sequence are longer than so many key tiles. */
static __device__ __forceinline__ int longer_than(const dhp_tiles_params *p, const sequence *s, int length) {
  const int keys = min(length, p->most_tiles) * p->tile_k; /* that the last query has to see more of */
  const int first_query = max(keys - s->highest, 0);
  const int are = (length < p->most_tiles) & (s->keys > keys) & (s->queries > first_query);
  return choose(length == 0, s->tiles, choose(are, s->tiles - quotient(first_query, p->by_rows), 0));
}

/* Whether the lengths of q are none. */
static __device__ __forceinline__ int q_lengths_are_bad(const dhp_tiles_params *p, int lane) {
  int bad = (load_word(p->cu_seqlens_q) != 0) | (load_word(p->cu_seqlens_q + p->sequences) > p->tokens_q);
#pragma unroll 1
  for (int first = 0; first < p->sequences; first += LANES) {
    const int32_t *const lengths = p->cu_seqlens_q + min(first + lane, p->sequences - 1);
    const int64_t queries = (int64_t)load_word(lengths + 1) - load_word(lengths);
    bad |= (queries < 0) | (queries > p->most_q);
  }
  return sum_of_lanes(bad) != 0;
}

/* Whether a key that counts is in a page that does not exist. */
static __device__ __forceinline__ int pages_are_bad(const dhp_tiles_params *p, const sequence *s, int b, int lane) {
  int bad = 0;
  const int count = p->page_table ? round_up(s->keys, p->by_page_keys, p->page_keys) : 0;
#pragma unroll 1
  for (int first = 0; first < count; first += LANES) {
    const int page = load_word(p->page_table + (int64_t)b * p->width + min(first + lane, count - 1));
    bad |= (page < 0) | (page >= p->pages);
  }
  return sum_of_lanes(bad) != 0;
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128)
dhp_attention_tiles(const __grid_constant__ dhp_tiles_params p) {
  const int lane = (int)threadIdx.x % LANES, nth = (int)blockIdx.x * WARPS + (int)threadIdx.x / LANES;
  const int share = (p.sequences + LANES) / LANES; /* of sequences, and the rows that belong to none, for a lane */
  await_launches_before();
  begin_launches_after();
  const int q_is_bad = q_lengths_are_bad(&p, lane);

  /* The nth tile, one sequence after another: which sequence, and which of its tiles. */
  int own = 0;
#pragma unroll 1
  for (int i = 0; i < share; i++) {
    const int b = lane * share + i;
    const sequence s = sequence_at(&p, min(b, p.sequences), q_is_bad);
    own += choose(b <= p.sequences, s.tiles, 0);
  }
  int before = sum_before(own, lane), found = 0, found_tile = 0;
  const int count = sum_of_lanes(own);
#pragma unroll 1
  for (int i = 0; i < share; i++) {
    const int b = lane * share + i;
    const sequence s = sequence_at(&p, min(b, p.sequences), q_is_bad);
    const int is_one = b <= p.sequences, here = is_one & (nth >= before) & (nth - before < s.tiles);
    found += choose(here, b, 0);
    found_tile += choose(here, nth - before, 0);
    before += choose(is_one, s.tiles, 0);
  }
  const int b = sum_of_lanes(found), tile = sum_of_lanes(found_tile);
  const sequence s = sequence_at(&p, b, q_is_bad);
  const int length = length_of(&p, &s, tile);

  /* Its place: behind all that are longer; of those that are as long, behind earlier sequences and later tiles. */
  int place = 0;
#pragma unroll 1
  for (int i = 0; i < share; i++) {
    const int other = lane * share + i;
    const sequence o = sequence_at(&p, min(other, p.sequences), q_is_bad);
    const int longer = longer_than(&p, &o, length), as_long = longer_than(&p, &o, length - 1) - longer;
    place += choose(other <= p.sequences, longer + choose(other < b, as_long, 0), 0);
  }
  place = sum_of_lanes(place) + s.tiles - 1 - tile - longer_than(&p, &s, length);

  const int listed = min(count, p.entries), exists = nth < listed;
  const int is_bad = s.is_bad | pages_are_bad(&p, &s, b, lane);
  const int keys = choose(is_bad, 0, s.keys);
  const int first_query = tile * p.rows, last_query = min(first_query + p.rows, s.queries) - 1;
  const int seen_by_first = clamped(first_query + s.highest + 1, 0, keys); /* keys before that, but for the window */
  const int seen_by_last = clamped(last_query + s.highest + 1, 0, keys);
  const int unseen_by_first = clamped(first_query + s.lowest, 0, keys); /* keys before that */
  const int unseen_by_last = clamped(last_query + s.lowest, 0, keys);
  const int end_tile = max(round_up(seen_by_last, p.by_tile_k, p.tile_k), 1);
  const int first_tile = min(quotient(unseen_by_first, p.by_tile_k), end_tile - 1);
  const int with_page = p.page_table != 0;

  const dhp_listed_tile entry = {
      .keys = keys,
      .key_row = with_page ? choose(is_bad | (b >= p.sequences), 0, b * p.width) : s.key_row,
      .last_tile = end_tile - 1,
      .key_tiles = end_tile - first_tile,
      .row = s.row + first_query,
      .row_end = s.row + last_query + 1,
      .last_key = min(first_query + s.highest, DHP_TILES_FAR),
      .first_key = max(first_query + s.lowest, -DHP_TILES_FAR),
      .masked = end_tile - quotient(seen_by_first, p.by_tile_k),
      .plain_end = end_tile - round_up(unseen_by_last, p.by_tile_k, p.tile_k),
      .is_bad = is_bad,
      .is_of_none = b >= p.sequences,
      .count = listed,
      .by_count = divisor_of(listed),
  };
  const int is_written = exists | (nth == 0);
  dhp_listed_tile *const to = p.list + choose(exists, place, 0);
#pragma unroll
  for (int i = 0; i < DHP_TILE_WORDS; i += 4)
    store_four((lane == 0) & is_written, (int32_t *)to + i, (const uint32_t *)&entry + i);
  end_together();
}
