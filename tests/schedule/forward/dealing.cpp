/*
 * dealing.cpp - which query tiles the CTAs of a launch compute, and over which keys: nth_query_tile of the forward
 * family, compiled for the host with the constants of one kernel, asked for every segment of every CTA, by its last
 * warpgroup; and what the others see of it. Within a window rows have one segment.
 *
 * Reads calls from standard input, a line each: B Hq Hk Sq Sk D is_causal causal_offset, and the window. Of those that
 * the plan gives to this kernel (float16), every query tile has to be computed once, segment by segment from the last
 * key that it sees to the first; or, if the plan splits segments, each of them once, also those of which it sees no
 * key. Prints a line for each: how busy the CTAs are kept, 1 if all are equally long; the splits; and the segments of
 * the query tile that has most. Status 1 and a sentence at the first violation.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "model.h"

#include "attention_fwd.cu"

extern "C" {
#include "../../../csrc/families/forward/schedule.h"
}

Index blockIdx, gridDim;
char shared[1]; /* the kernel itself never runs */

struct Call {
  long long batch, heads, key_heads, seqlen_q, seqlen_k, head_dim, is_causal, offset, left, right;
};

static void require(bool holds, const char *what, const Call &c) {
  if (holds) return;
  printf("violation: %s; call %lld %lld %lld %lld %lld %lld %lld %lld (%lld, %lld), CTA %u of %u\n", what, c.batch,
         c.heads, c.key_heads, c.seqlen_q, c.seqlen_k, c.head_dim, c.is_causal, c.offset, c.left, c.right, blockIdx.x,
         gridDim.x);
  exit(1);
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static dhp_tensor tensor(long long batch, long long heads, long long rows, long long columns) {
  return {nullptr, {batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}, DHP_FLOAT16};
}

/* Of dhp_fwd_window. */
static int lowest_of(const Call &c) {
  return (int)std::min<int64_t>(std::max<int64_t>(c.offset - c.left, -c.seqlen_q), c.seqlen_k);
}

/* The deal of a call's query tiles, as far as it was checked. */
struct Deal {
  const Call &call;
  const dhp_plan &plan;
  const dhp_fwd_params &p;
  std::vector<char> computed; /* by query tile and, if they are split, segment: how often */
  int64_t current;            /* the query tile that a CTA is at */
  int64_t unvisited;          /* key tiles of it; 0: the next one is another */
};

static int rows_of_tile(const Deal &d) { return d.plan.kernel->tile_q / d.plan.heads_per_tile; }
static int rows_of_group(const Deal &d) { return rows_of_tile(d) / WARPGROUPS; }

/* The end of the keys that a row sees, and where they begin, if it sees any. */
static int64_t seen_by(const Call &c, int64_t row) {
  const int64_t right = c.is_causal ? 0 : c.right;
  return right >= 0 ? std::min(std::max<int64_t>(row + 1 + c.offset + right, 0), (int64_t)c.seqlen_k) : c.seqlen_k;
}
static int64_t first_of(const Call &c, int64_t row) {
  return c.left >= 0 ? std::max<int64_t>(row + c.offset - c.left, 0) : 0;
}

/* How many key tiles lie before the end of those that a query tile has to visit, and before the first of them. */
static int64_t key_tiles_of(const Deal &d, const query_tile &w) {
  const int64_t last_row = std::min<int64_t>(w.row + rows_of_tile(d), d.call.seqlen_q) - 1;
  return std::max<int64_t>(ceil_div(seen_by(d.call, last_row), TILE_K), 1);
}
static int64_t bottom_of(const Deal &d, const query_tile &w) {
  return std::min<int64_t>(first_of(d.call, w.row) / TILE_K, key_tiles_of(d, w) - 1);
}

/* Which query tile this is, of those of all head groups. */
static int64_t index_of(const Deal &d, const query_tile &w) {
  const Call &c = d.call;
  const int rows = rows_of_tile(d), heads = d.plan.heads_per_tile;
  const int64_t groups = c.heads / heads, group = w.head / heads, tile = w.row / rows;
  require(w.batch >= 0 && w.batch < c.batch && group >= 0 && group < groups && tile >= 0 && tile < d.plan.q_tiles,
          "a query tile that there is not", c);
  require(w.head % heads == 0 && w.row % rows == 0, "a query tile that begins in between", c);
  require(w.key_head == w.head / d.p.heads_per_key_head, "another key head", c);
  return (w.batch * groups + group) * d.plan.q_tiles + tile;
}

/* A segment of a query tile that is this CTA's work from its last key to its first. */
static void check_next(Deal &d, const query_tile &w) {
  const int64_t index = index_of(d, w), key_tiles = key_tiles_of(d, w), bottom = bottom_of(d, w);
  if (d.unvisited == 0) {
    require(d.computed[(size_t)index]++ == 0, "a query tile is computed twice", d.call);
    d.current = index;
    d.unvisited = key_tiles - bottom;
  }
  require(index == d.current, "a query tile is left before its first key", d.call);
  require(w.last == bottom + d.unvisited - 1, "a segment that is not the next one", d.call);
  require(w.key_tiles == (WINDOWED ? d.unvisited : w.last % SEGMENT_TILES + 1),
          "a segment that begins elsewhere than all others", d.call);
  require(resumes(&d.p, &w) == (w.last < key_tiles - 1), "an earlier segment is forgotten, or imagined", d.call);
  d.unvisited -= w.key_tiles;
  require(WINDOWED || next_segment(&d.p, &w) == (d.unvisited > 0 ? d.unvisited - 1 : -1), "another segment comes next",
          d.call);
}

/* One that is an item of its own. Parts are found by its place among all. */
static void check_split(Deal &d, const query_tile &w, int nth) {
  const int64_t index = index_of(d, w), key_tiles = key_tiles_of(d, w);
  const bool is_seen = w.last < DHP_NOT_SEEN_TILES;
  const int64_t begin = is_seen ? w.last - w.last % SEGMENT_TILES : w.last - DHP_NOT_SEEN_TILES;
  const int64_t segment = begin / SEGMENT_TILES;
  require(begin % SEGMENT_TILES == 0 && segment < d.p.splits, "a segment that there is not", d.call);
  require(d.computed[(size_t)(index * d.p.splits + segment)]++ == 0, "a segment is computed twice", d.call);
  require(is_seen == (begin < key_tiles), "keys are visited that no row sees, or others are not", d.call);
  require(w.key_tiles == (is_seen ? std::min<int64_t>(key_tiles - begin, SEGMENT_TILES) : 1) &&
              (!is_seen || w.last == begin + w.key_tiles - 1),
          "the wrong key tiles of a segment", d.call);
  require(!resumes(&d.p, &w) && next_segment(&d.p, &w) < 0, "a segment that goes on, though all are split", d.call);
  const int64_t group = index / d.plan.q_tiles, tile = index % d.plan.q_tiles;
  require((int64_t)nth * gridDim.x + blockIdx.x ==
              (group * d.p.splits + segment) * d.plan.q_tiles + d.plan.q_tiles - 1 - tile,
          "a part where another is expected", d.call);
}

/* Its first steps need the mask, all that have a key which the first row does not see. */
static void check_mask(const Deal &d, const query_tile &w, int group) {
  const int64_t first = w.row + (OWN_TILES ? group * rows_of_group(d) : 0);
  const int64_t masked = w.last + 1 - std::min<int64_t>(seen_by(d.call, first), d.p.seqlen_k) / TILE_K;
  require(std::min(std::max(masked_steps(&d.p, &w, group), 0), w.key_tiles) ==
              std::min(std::max<int64_t>(masked, 0), (int64_t)w.key_tiles),
          "the wrong number of key tiles under the mask", d.call);
#if WINDOWED /* and its last ones, all that have a key which the last row, be there one or not, sees no more */
  const int64_t last = w.row + (OWN_TILES ? group + 1 : WARPGROUPS) * rows_of_group(d) - 1;
  const int64_t plain = w.last + 1 - ceil_div(first_of(d.call, last), TILE_K);
  require(std::max(plain_end(&d.p, &w, group, lowest_of(d.call)), 0) == std::max<int64_t>(plain, 0),
          "the wrong number of key tiles where the window begins", d.call);
#endif
}

/* Its own steps, and whether of the key tile where it begins, or ends, it sees a half only. */
static void check_own(const Deal &d, const query_tile &w, int group) {
  const int64_t first = w.row + group * rows_of_group(d), last = first + rows_of_group(d) - 1;
  const int64_t bottom = std::min<int64_t>(first_of(d.call, first) / TILE_K, w.last);
  const int64_t steps = LEAVES_EARLY ? w.last + 1 - bottom : w.key_tiles;
  require(own_steps(&d.p, &w, group, lowest_of(d.call)) == steps, "the wrong number of a warpgroup's steps", d.call);
  const int64_t seen = std::min<int64_t>(seen_by(d.call, last), d.p.seqlen_k);
  require(begins_with_half(&d.p, &w, group) == (HALF_TILES && seen <= (int64_t)w.last * TILE_K + TILE_K / 2),
          "a half of the last key tile is left out, or is not", d.call);
  const int64_t half = (w.last + 1 - steps) * TILE_K + TILE_K / 2;
  require(ends_with_half(&d.p, &w, group, lowest_of(d.call)) ==
              (HALF_TILES && WINDOWED && steps > 1 && first_of(d.call, first) >= half),
          "a half of the first key tile is left out, or is not", d.call);
}

/* Another warpgroup is at the same query tile, and begins with the last key tile that its rows see. */
static void check_group(const Deal &d, const query_tile &w, int nth, int from, int group) {
  const query_tile own = nth_query_tile(&d.p, nth, from, group, lowest_of(d.call));
  require(own.batch == w.batch && own.head == w.head && own.key_head == w.key_head && own.row == w.row,
          "warpgroups are at different query tiles", d.call);
  const int64_t last_row = std::min<int64_t>(w.row + (group + 1) * rows_of_group(d), d.call.seqlen_q) - 1;
  const int64_t last = OWN_TILES ? std::max<int64_t>(ceil_div(seen_by(d.call, last_row), TILE_K), 1) - 1 : w.last;
  require(own.last == last && own.key_tiles == w.key_tiles - (w.last - last), "other keys than a warpgroup sees",
          d.call);
  require(!OWN_TILES || steps_before(&d.p, &own) == w.last - last, "the wrong number of steps of others", d.call);
  check_mask(d, own, group);
  if (ONE_SEGMENT) check_own(d, own, group);
}

/* What all CTAs do, checked; returns how busy they are kept. */
static double check(const Call &c, const dhp_plan &plan, const dhp_fwd_params &p) {
  const bool is_split = p.splits > 1;
  const size_t tiles = (size_t)(c.batch * c.heads / plan.heads_per_tile * plan.q_tiles);
  Deal d = {c, plan, p, std::vector<char>(tiles * (size_t)p.splits), 0, 0};
  double longest = 0., all = 0.;
  gridDim.x = (unsigned)plan.grid;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    double steps = 0.;
    int nth = 0;
    int from = -1;
    query_tile w = nth_query_tile(&p, nth, from, WARPGROUPS - 1, lowest_of(c));
    require(w.key_tiles > 0, "a CTA without work", c);
    while (w.key_tiles > 0) {
      is_split ? check_split(d, w, nth) : check_next(d, w);
      check_mask(d, w, WARPGROUPS - 1);
      if (ONE_SEGMENT) check_own(d, w, WARPGROUPS - 1);
      for (int group = 0; group < WARPGROUPS - 1; group++)
        check_group(d, w, nth, from, group);
      from = ONE_SEGMENT ? -1 : next_segment(&p, &w);
      steps += w.key_tiles + (from < 0);
      nth += from < 0;
      w = nth_query_tile(&p, nth, from, WARPGROUPS - 1, lowest_of(c));
    }
    require(d.unvisited == 0, "a CTA ends within a query tile", c);
    longest = std::max(longest, steps);
    all += steps;
  }
  require(std::all_of(d.computed.begin(), d.computed.end(), [](char count) { return count == 1; }),
          "a query tile or a segment is left out", c);
  return all / (longest * (double)plan.grid);
}

/*
 * Returns the segments of the query tile that has most. Where they are split each item has its place for parts, else
 * each CTA if there are several.
 */
static int64_t check_parts(const Call &c, const dhp_plan &plan) {
  const int64_t of_keys = std::max<int64_t>(ceil_div(seen_by(c, c.seqlen_q - 1), SEGMENT_TILES * TILE_K), 1);
  const int64_t segments = WINDOWED ? 1 : of_keys;
  const int64_t places = plan.splits > 1 ? plan.items : segments > 1 ? plan.grid : 0;
  require(plan.splits == 1 || plan.splits == segments, "the wrong number of splits", c);
  require(plan.parts == places * plan.kernel->tile_q, "the wrong number of parts", c);
  return segments;
}

int main() {
  Call c;
  while (scanf("%lld %lld %lld %lld %lld %lld %lld %lld %lld %lld", &c.batch, &c.heads, &c.key_heads, &c.seqlen_q,
               &c.seqlen_k, &c.head_dim, &c.is_causal, &c.offset, &c.left, &c.right) == 10) {
    dhp_attention args = {};
    args.q = args.out = tensor(c.batch, c.heads, c.seqlen_q, c.head_dim);
    args.k = args.v = tensor(c.batch, c.key_heads, c.seqlen_k, c.head_dim);
    args.scale = 1.f;
    args.is_causal = c.is_causal != 0;
    args.causal_offset = c.offset;
    args.is_windowed = c.left >= 0 || c.right >= 0;
    args.window_left = c.left;
    args.window_right = c.right;
    dhp_plan plan;
    dhp_error error;
    if (dhp_plan_attention(&args, &plan, &error) != DHP_OK) {
      printf("violation: %s\n", error.text);
      return 1;
    }
    const dhp_kernel_info *const k = plan.kernel;
    if (k->head_dim != HEAD_DIM || k->warpgroups != WARPGROUPS || k->tile_q != WARPGROUPS * ROWS ||
        k->is_short != ONE_SEGMENT || (strcmp(k->part, "window out") == 0) != WINDOWED)
      continue;
    dhp_fwd_params p = {};
    p.batch = (int32_t)c.batch;
    p.heads_per_key_head = (int32_t)(c.heads / c.key_heads);
    const int64_t end = c.offset + (c.is_causal ? 0 : std::max<int64_t>(c.right, 0));
    const int64_t highest = std::min(std::max<int64_t>(end, -c.seqlen_q), (int64_t)c.seqlen_k);
    p.highest = (int32_t)(c.is_causal || c.right >= 0 ? highest : c.seqlen_k);
    p.seqlen_k = (int32_t)seen_by(c, c.seqlen_q - 1);
    while (plan.heads_per_tile << p.log2_rows < ROWS)
      p.log2_rows++;
    dhp_set_schedule(&p, &args, &plan);
    const int64_t segments = check_parts(c, plan);
    printf("%lld %lld %lld %lld %lld %lld %lld %lld %lld %lld: %.4f %d %lld\n", c.batch, c.heads, c.key_heads,
           c.seqlen_q, c.seqlen_k, c.head_dim, c.is_causal, c.offset, c.left, c.right, check(c, plan, p), plan.splits,
           (long long)segments);
  }
  return 0;
}
