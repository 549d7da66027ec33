/*
 * listed_words.h - a list of query tiles, and how a warp that is one thread reads it: its word says which tile and head
 * group it is of, and word_of looks the lane's up. Included before "attention_fwd.cu", which is a copy that asks these.
 */
#ifndef DHP_TESTS_LISTED_WORDS_H
#define DHP_TESTS_LISTED_WORDS_H

#include <vector>

#include "../tiles/params.h"

static std::vector<dhp_listed_tile> the_list;

enum { MOST_HEAD_GROUPS = 1 << 8 };

/* As the family tiles writes it: every entry has the count; the first one is there if that is 0, too. */
static const dhp_listed_tile *list_with_count() {
  const int count = (int)the_list.size();
  the_list.resize(count > 0 ? (size_t)count : 1);
  for (dhp_listed_tile &entry : the_list) {
    entry.count = count;
    entry.by_count = dhp_divisor_of(count);
  }
  return the_list.data();
}

static int word_of_warp(int tile, int head_group) { return tile * MOST_HEAD_GROUPS + head_group; }

static int looked_up(int word, int lane) {
  const int32_t *const entry = &the_list.at((size_t)(word / MOST_HEAD_GROUPS)).keys;
  return lane < DHP_TILE_WORDS ? entry[lane] : word % MOST_HEAD_GROUPS;
}

#endif
