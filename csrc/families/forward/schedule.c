/*
 * schedule.c - the host's half of the static schedule: the numbers from which query_tiles.cuh finds a CTA's query
 * tiles. Functions of public shape alone.
 */
#include "schedule.h"

/*
 * With 2^(shift - 1) < d <= 2^shift, multiplier = floor(2^(31 + shift) / d) + 1 fits 32 bits, and d times it exceeds
 * 2^(31 + shift) by at most 2^shift: so n multiplier / 2^(31 + shift) rounds down to n / d for n < 2^31 (Granlund and
 * Montgomery, "Division by Invariant Integers using Multiplication", 1994, theorem 4.2).
 */
static dhp_divisor divisor(int64_t d) {
  uint32_t shift = 0;
  while ((int64_t)1 << shift < d)
    shift++;
  return (dhp_divisor){(uint32_t)(((uint64_t)1 << (31 + shift)) / (uint64_t)d + 1), shift};
}

void dhp_set_schedule(dhp_fwd_params *params, const dhp_attention *args, const dhp_plan *plan) {
  const int64_t *const q = args->q.size;
  const int64_t groups = q[1] / plan->heads_per_tile;
  const int64_t ordered_items = plan->items - plan->listed_groups * plan->q_tiles;
  params->head_groups = (int32_t)groups;
  params->q_tiles = (int32_t)plan->q_tiles;
  params->items = (int32_t)plan->items;
  params->ordered_items = (int32_t)ordered_items;
  params->ordered_rounds = (int32_t)(ordered_items / plan->grid);
  params->ordered_rest = (int32_t)(ordered_items % plan->grid);
  params->mirrored = plan->mirrored;
  params->listed_groups = (int32_t)plan->listed_groups;
  params->by_q_tiles = divisor(plan->q_tiles);
  params->by_listed_groups = divisor(plan->listed_groups > 0 ? plan->listed_groups : 1);
  params->by_head_groups = divisor(groups);
  params->by_heads_per_key_head = divisor(q[1] / args->k.size[1]);
}
