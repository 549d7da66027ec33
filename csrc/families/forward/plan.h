/* plan.h - how a public shape becomes a launch of the forward. */
#ifndef DHP_FORWARD_PLAN_H
#define DHP_FORWARD_PLAN_H

#include "../../dhp_fa.h"

/* causal_offset clamped to [-Sq, Sk]: outside of it every query sees no key, or every key, and nothing more changes. */
int32_t dhp_clamp_offset(const dhp_attention *args);

/* How many keys, from the first on, at least one query sees; the others need not exist. */
int64_t dhp_keys_seen(const dhp_attention *args);

#endif
