/*
 * segments.h - the key segments that an output row is a fold over. Public.
 *
 * Keys are divided into segments at multiples of DHP_SEGMENT_KEYS, counted from key 0 of their sequence, wherever it
 * lies in memory and whatever a mask hides of it. Over what it sees of a segment a row is a chain of its own: a running
 * maximum m, a sum l of p = 2^(score - shift(m)), and o, the sum of p v. Segments are folded in ascending order, from
 * M = -inf, L = 0, O = -0 on, or with a sink from M = sink log2(e), L = 2^(M - shift(M)), by
 *
 *   M' = max(M, m),  a = 2^(shift(M) - shift(M')),  b = 2^(shift(m) - shift(M')),  L' = L a + (l b),  O' = O a + (o b),
 *
 * where the product in brackets is rounded, and the rest once more (twice without a multiply-add). shift(x) is x, or 0
 * where x is infinite; a is 0 where M is -inf, b where m is. A segment of which a row sees nothing is left out. So
 * segments may be computed anywhere and in any order, and a row that sees keys of one alone, and no sink, has the bits
 * of its chain.
 */
#ifndef DHP_CPU_SEGMENTS_H
#define DHP_CPU_SEGMENTS_H

#include "../mask.h"

enum {
  /* Bits of rows that see several segments depend on it. A power of two: pages, and parts of a sequence, end where
   * segments do. So long that a chain's beginning and its fold are not felt, so short that a cache of 32768 keys keeps
   * eight threads busy. */
  DHP_SEGMENT_KEYS = 4096
};

/* Segments [first, last). */
typedef struct dhp_segments {
  int64_t first, last;
} dhp_segments;

/* Those that a range of keys has a part in; of no keys, one. */
static inline dhp_segments dhp_segments_of(dhp_key_range keys) {
  const int64_t first = keys.first / DHP_SEGMENT_KEYS, last = (keys.last + DHP_SEGMENT_KEYS - 1) / DHP_SEGMENT_KEYS;
  return (dhp_segments){first, last > first ? last : first + 1};
}

/* What of a range lies in a segment. */
static inline dhp_key_range dhp_segment_part(dhp_key_range keys, int64_t segment) {
  const int64_t from = segment * DHP_SEGMENT_KEYS, to = from + DHP_SEGMENT_KEYS;
  return (dhp_key_range){dhp_clamp(keys.first, from, to), dhp_clamp(keys.last, from, to)};
}

#endif
