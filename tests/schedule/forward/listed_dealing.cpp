/*
 * listed_dealing.cpp - which query tiles of a list the CTAs of a launch compute: nth_query_tile of listed_tiles.cuh,
 * compiled for the host, asked for all of every CTA.
 *
 * Reads calls from standard input, a line each: CTAs, head groups, head groups of a section, tiles of the list, and the
 * key tiles of each, longest first. Every tile has to be computed once for every head group. Prints for each how busy
 * the CTAs are kept, 1 if all are equally long. Status 1 and a sentence at the first violation.
 */
#include <stdio.h>

#include <algorithm>
#include <vector>

#include "model.h"

#include "listed_words.h"

#include "attention_fwd.cu"

Index blockIdx, gridDim;
char shared[1]; /* the kernel itself never runs */

/* Of an entry only what nth_query_tile looks at. */
static void set_list(const std::vector<int> &key_tiles) {
  the_list.clear();
  for (int n : key_tiles) {
    dhp_listed_tile entry = {};
    entry.last_tile = n - 1;
    entry.key_tiles = n;
    the_list.push_back(entry);
  }
}

int main() {
  int ctas, groups, section, count;
  while (scanf("%d %d %d %d", &ctas, &groups, &section, &count) == 4) {
    std::vector<int> key_tiles((size_t)count);
    for (int &n : key_tiles)
      if (scanf("%d", &n) != 1) return 2;
    set_list(key_tiles);
    dhp_fwd_params p = {};
    p.head_groups = groups;
    p.by_head_groups = dhp_divisor_of(groups);
    dhp_fwd_list list = {};
    list.list = list_with_count();
    list.section = section;
    list.by_section = dhp_divisor_of(section);
    std::vector<char> computed((size_t)(count * groups));
    double longest = 0., all = 0.;
    gridDim.x = (unsigned)ctas;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
      double steps = 0.;
      query_tile w = nth_query_tile(&p, &list, word_of_warp(0, 0), 0, -1);
      for (int nth = 1; w.key_tiles > 0; nth++) {
        const int tile = w.word / MOST_HEAD_GROUPS, group = w.word % MOST_HEAD_GROUPS;
        if (tile < 0 || tile >= count || group >= groups || computed[(size_t)(tile * groups + group)]++) {
          printf("violation: tile %d, head group %d, CTA %u\n", tile, group, blockIdx.x);
          return 1;
        }
        steps += key_tiles[(size_t)tile] + 1;
        w = nth_query_tile(&p, &list, w.word, nth, -1);
      }
      longest = std::max(longest, steps);
      all += steps;
    }
    if (!std::all_of(computed.begin(), computed.end(), [](char times) { return times == 1; })) {
      printf("violation: a tile is left out\n");
      return 1;
    }
    printf("%.4f\n", all / std::max(longest * ctas, 1.));
  }
  return 0;
}
