/* sequence.h - a sequence of a packed call as a call of its own, over tensors that begin at its first rows. Public. */
#ifndef DHP_CPU_SEQUENCE_H
#define DHP_CPU_SEQUENCE_H

#include "../../mask.h"
#include "../places.h"

typedef struct dhp_cpu_sequence {
  dhp_attention args;
  dhp_mask mask;
  dhp_cpu_places places;
  int64_t first_query, first_key; /* of the packed rows; no first_key with pages */
} dhp_cpu_sequence;

/* Sequence b; the one behind the last has the query rows that belong to none, and no key. */
dhp_cpu_sequence dhp_cpu_sequence_of(const dhp_varlen *args, int64_t b);

/* Of its keys: from the first that counts up to the end of those that do. */
dhp_key_range dhp_cpu_keys_of(const dhp_varlen *args, int64_t b);

/* Rows [first, first + count) of every head; without data where t has none. */
dhp_tensor dhp_cpu_rows_from(const dhp_tensor *t, int64_t first, int64_t count);

/* lse or grad_lse of a call of this dtype from that row of a head on. */
const void *dhp_cpu_lse_from(const void *lse, dhp_dtype dtype, int64_t first);

#endif
