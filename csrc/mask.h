/*
 * mask.h - which keys a query sees: public, and described in this one place.
 *
 * Every mask is a band of the scores: query i sees key j iff lowest <= j - i <= highest. So the keys that a row sees
 * are a half-open range [first, last), and from a row to the next neither end moves back. A kernel may rely on these
 * two properties; what else it relies on (gradients on a GPU: that every range begins at key 0, so no window) it has to
 * ask for, and refuse a call that has it not. So a new mask is a new way to choose lowest and highest, here.
 */
#ifndef DHP_MASK_H
#define DHP_MASK_H

#include "dhp_fa.h"

typedef struct dhp_mask {
  int64_t queries, keys;   /* Sq, Sk */
  int64_t lowest, highest; /* of j - i; in [-queries, keys]: further out, all or none would be seen just the same */
} dhp_mask;

/* Keys [first, last); none if both are equal. */
typedef struct dhp_key_range {
  int64_t first, last;
} dhp_key_range;

static inline int64_t dhp_clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* Any lowest and highest, for lengths of at most 2^62; INT64_MIN and INT64_MAX: no bound. */
static inline dhp_mask dhp_mask_band(int64_t queries, int64_t keys, int64_t lowest, int64_t highest) {
  return (dhp_mask){.queries = queries,
                    .keys = keys,
                    .lowest = dhp_clamp(lowest, -queries, keys),
                    .highest = dhp_clamp(highest, -queries, keys)};
}

/*
 * The mask of a call of these lengths whose diagonal, j - i = offset, is where causal rows end and windows are counted
 * from. A bound that int64 cannot hold is none.
 */
static inline dhp_mask dhp_mask_along(const dhp_attention *args, int64_t queries, int64_t keys, int64_t offset) {
  const int64_t left = args->is_windowed ? args->window_left : -1, right = args->is_windowed ? args->window_right : -1;
  int64_t lowest = INT64_MIN, highest = INT64_MAX;
  if (left >= 0 && offset >= INT64_MIN + left) lowest = offset - left;
  if (right >= 0 && offset <= INT64_MAX - right) highest = offset + right;
  if (args->is_causal && offset < highest) highest = offset;
  return dhp_mask_band(queries, keys, lowest, highest);
}

/* The mask of a call. */
static inline dhp_mask dhp_mask_of(const dhp_attention *args) {
  return dhp_mask_along(args, args->q.size[2], args->k.size[2], args->causal_offset);
}

/* Whether no row of a call sees more than so many keys, whatever the lengths: left + 1 + right. */
static inline int dhp_window_is_within(const dhp_attention *args, int64_t keys) {
  const int64_t left = args->is_windowed ? args->window_left : -1;
  const int64_t right = args->is_causal ? 0 : args->is_windowed ? args->window_right : -1;
  return left >= 0 && right >= 0 && left < keys && right < keys - left;
}

/* What query i in [0, queries) sees, within [0, keys]. */
static inline dhp_key_range dhp_mask_row(const dhp_mask *mask, int64_t i) {
  const int64_t first = dhp_clamp(i + mask->lowest, 0, mask->keys);
  return (dhp_key_range){first, dhp_clamp(i + mask->highest + 1, first, mask->keys)};
}

/* Whether a query does not see key 0: as ranges move on, the last one. */
static inline int dhp_mask_hides_first(const dhp_mask *mask) {
  return mask->queries > 0 && mask->lowest > 1 - mask->queries;
}

/* The same band with the places of queries and keys exchanged: row j of it is the range of queries that see key j. */
static inline dhp_mask dhp_mask_transposed(const dhp_mask *mask) {
  return dhp_mask_band(mask->keys, mask->queries, -mask->highest, -mask->lowest);
}

/* No query sees a key from this one on: they need not exist. */
static inline int64_t dhp_mask_keys_seen(const dhp_mask *mask) {
  return dhp_clamp(mask->queries + mask->highest, 0, mask->keys);
}

#endif
