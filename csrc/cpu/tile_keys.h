/* tile_keys.h - which of a key tile's keys each row sees: public. */
#ifndef DHP_CPU_TILE_KEYS_H
#define DHP_CPU_TILE_KEYS_H

#include "tile_vectors.h"

/*
 * Row i sees keys [first[i], last[i]) of the tile, counted from its beginning; none if both are equal. From a row to
 * the next neither end moves back: what all rows of a block see is what is left between the last one's first key and
 * the first one's last. Lanes without a row copy the last row.
 */
typedef struct tile_keys {
  int32_t first[DHP_CPU_TILE_Q], last[DHP_CPU_TILE_Q];
} tile_keys;

/* seen: the ranges of `queries` lanes. The tile holds the n keys from `start` on. */
static tile_keys keys_of_tile(const dhp_key_range seen[DHP_CPU_TILE_Q], int queries, int64_t start, int n) {
  tile_keys keys = {{0}, {0}};
  for (int i = 0; i < queries; i++) {
    keys.first[i] = (int32_t)dhp_clamp(seen[i].first - start, 0, n);
    keys.last[i] = (int32_t)dhp_clamp(seen[i].last - start, 0, n);
  }
  return keys;
}

#endif
