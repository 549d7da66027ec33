/*
 * walks.cpp - what the CTAs of a backward launch own and walk: walk_of of the backward family, compiled for the host
 * with the constants of one kernel, asked by every CTA of a call.
 *
 * Reads calls from standard input, a line each: B Hq Hk Sq Sk is_causal causal_offset. Every owned row has to belong to
 * one CTA, every visible pair has to lie in one tile that the CTA walks, and a tile that is walked without the mask has
 * to hold no pair that is hidden. Status 1 and a sentence at the first violation.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "model.h"

#include KERNEL_SOURCE

Index blockIdx, gridDim;
char shared[1]; /* the kernel itself never runs */

struct Call {
  long long batch, heads, key_heads, seqlen_q, seqlen_k, is_causal, offset;
};

static void require(bool holds, const char *what, const Call &c) {
  if (holds) return;
  printf("violation: %s; call %lld %lld %lld %lld %lld %lld %lld, CTA %u of %u\n", what, c.batch, c.heads, c.key_heads,
         c.seqlen_q, c.seqlen_k, c.is_causal, c.offset, blockIdx.x, gridDim.x);
  exit(1);
}

static bool sees(const Call &c, long long query, long long key) {
  return query < c.seqlen_q && key < c.seqlen_k && (!c.is_causal || key <= query + c.offset);
}

/* As launch.c fills them. */
static dhp_bwd_params parameters(const Call &c, int listed_heads) {
  const long long highest = std::min(std::max(c.offset, -c.seqlen_q), c.seqlen_k);
  const long long seen = c.is_causal ? std::min(c.seqlen_k, c.seqlen_q + highest) : c.seqlen_k;
  dhp_bwd_params p = {};
  p.heads = (int32_t)c.heads;
  p.own_heads = (int32_t)(OWNS_KEYS ? c.key_heads : c.heads);
  p.heads_per_key_head = (int32_t)(c.heads / c.key_heads);
  p.seqlen_q = (int32_t)c.seqlen_q;
  p.seqlen_k = (int32_t)std::max(seen, 0ll);
  p.own_rows = (int32_t)(OWNS_KEYS ? c.seqlen_k : c.seqlen_q);
  p.own_tiles = (p.own_rows + WARPGROUPS * ROWS - 1) / (WARPGROUPS * ROWS);
  p.is_causal = (int32_t)c.is_causal;
  p.causal_offset = (int32_t)highest;
  p.listed_heads = listed_heads;
  p.ordered_heads = (int32_t)c.batch * p.own_heads - listed_heads;
  p.by_own_tiles = dhp_divisor_of(p.own_tiles);
  p.by_listed_heads = dhp_divisor_of(listed_heads);
  p.by_own_heads = dhp_divisor_of(p.own_heads);
  p.by_heads_per_key_head = dhp_divisor_of(p.heads_per_key_head);
  return p;
}

/* One CTA's tiles against every pair of its owned rows. */
static void check_tiles(const Call &c, const walk &w) {
  const long long walked_rows = OWNS_KEYS ? c.seqlen_q : c.seqlen_k;
  const long long own_rows = OWNS_KEYS ? c.seqlen_k : c.seqlen_q;
  const long long own_end = std::min<long long>(w.own_row + WARPGROUPS * ROWS, own_rows);
  std::vector<int> visits((size_t)(walked_rows + WALK), 0), is_masked((size_t)(walked_rows + WALK), 0);
  place at = {0, 0};
  for (; at.head == 0 && at.tile < w.tiles; at = place_after(&w, at)) {
    const int first = first_row(&w, at), masked = at.tile < w.masked;
    require(first >= 0 && first % WALK == 0 && first < walked_rows, "a walked tile that there is not", c);
    for (int i = 0; i < WALK; i++) {
      visits[(size_t)(first + i)]++;
      is_masked[(size_t)(first + i)] = masked;
    }
  }
  /* queries beyond the last are all zero and add nothing; keys beyond the last have to be masked */
  const long long end = OWNS_KEYS ? walked_rows : walked_rows + WALK;
  for (long long own = w.own_row; own < own_end; own++)
    for (long long walked = 0; walked < end; walked++) {
      const bool seen = OWNS_KEYS ? sees(c, walked, own) : sees(c, own, walked);
      const int count = visits[(size_t)walked];
      require(count <= 1, "a tile is walked twice", c);
      require(!seen || count == 1, "a visible pair is not walked", c);
      require(seen || count == 0 || is_masked[(size_t)walked], "a hidden pair is walked without the mask", c);
    }
}

static void check(const Call &c, int listed_heads) {
  const dhp_bwd_params p = parameters(c, listed_heads);
  int longest = INT_MAX; /* of the list so far */
  std::vector<char> owned((size_t)(c.batch * p.own_heads * p.own_tiles));
  gridDim.x = (unsigned)owned.size();
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    const walk w = walk_of(&p, (int)blockIdx.x);
    require(w.batch >= 0 && w.batch < c.batch && w.own_head >= 0 && w.own_head < p.own_heads && w.own_row >= 0 &&
                w.own_row < p.own_rows && w.own_row % (WARPGROUPS * ROWS) == 0,
            "rows that there are not", c);
    char &count = owned[(size_t)((w.batch * p.own_heads + w.own_head) * p.own_tiles + w.own_row / (WARPGROUPS * ROWS))];
    require(count++ == 0, "rows are owned twice", c);
    require(w.heads == (OWNS_KEYS ? p.heads_per_key_head : 1) &&
                w.head == (OWNS_KEYS ? w.own_head * p.heads_per_key_head : w.own_head / p.heads_per_key_head),
            "other heads are walked", c);
    require(w.masked >= 0 && w.masked <= w.tiles, "more tiles under the mask than there are", c);
    if ((int)blockIdx.x >= p.ordered_heads * p.own_tiles) {
      require(w.tiles <= longest, "a longer walk comes later in the list", c);
      longest = w.tiles;
    }
    check_tiles(c, w);
  }
}

int main() {
  Call c;
  long calls = 0;
  while (scanf("%lld %lld %lld %lld %lld %lld %lld", &c.batch, &c.heads, &c.key_heads, &c.seqlen_q, &c.seqlen_k,
               &c.is_causal, &c.offset) == 7) {
    const long long heads = c.batch * (OWNS_KEYS ? c.key_heads : c.heads);
    for (long long listed : {0ll, 1ll, heads / 2, heads})
      check(c, (int)std::min(listed, heads));
    calls++;
  }
  printf("%ld calls\n", calls);
  return 0;
}
