/*
 * schedule.c - the host's half of the static schedule: the numbers from which query_tiles.cuh finds a CTA's query
 * tiles. Functions of public shape alone.
 */
#include "schedule.h"

void dhp_set_schedule(dhp_fwd_params *params, const dhp_attention *args, const dhp_plan *plan) {
  const int64_t *const q = args->q.size;
  const int64_t groups = q[1] / plan->heads_per_tile;
  const int64_t ordered_items = plan->items - plan->listed_groups * plan->q_tiles;
  params->head_groups = (int32_t)(groups * plan->splits);
  params->q_tiles = (int32_t)plan->q_tiles;
  params->items = (int32_t)plan->items;
  params->ordered_items = (int32_t)ordered_items;
  params->ordered_rounds = (int32_t)(ordered_items / plan->grid);
  params->ordered_rest = (int32_t)(ordered_items % plan->grid);
  params->mirrored = plan->mirrored;
  params->listed_groups = (int32_t)plan->listed_groups;
  params->by_q_tiles = dhp_divisor_of(plan->q_tiles);
  params->by_listed_groups = dhp_divisor_of(plan->listed_groups);
  params->splits = plan->splits;
  params->by_splits = dhp_divisor_of(plan->splits);
  params->by_head_groups = dhp_divisor_of(params->head_groups);
  params->by_heads_per_key_head = dhp_divisor_of(q[1] / args->k.size[1]);
}
