/*
 * plan.c - which calls the decode kernels serve: those whose few rows leave most of the GPU idle if a CTA has all of a
 * row's keys, unless there are so many units that all wait for bytes: then the forward is faster. That changes no
 * output bit. It never looks at a value.
 */
#include "../../hopper/chip.h"
#include "../../kernels/kernel_table.h"
#include "../fold/launch.h"
#include "launch.h"
#include "params.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_decode;

/*
 * Bytes of k and v that all units together get in a cycle. With unit_cycles and step_cycles of family.py fitted to 411
 * shapes on an H200 (benchmarks/results/kernel_choice/h200_decode.json).
 */
static const double BYTES_PER_CYCLE = 4000.;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/*
 * Clusters at a time, by the same times: all CTAs of one lie in a part of the GPU that has 16 or 18 multiprocessors,
 * not all of them usable, so of 8 CTAs there are 15 where 132 would be 16, and of 4 there are 31.
 */
static int clusters_at_a_time(int cluster) {
  const int all = DHP_MULTIPROCESSORS / cluster;
  return cluster == 8 ? all - 1 : cluster == 4 ? all - 2 : all;
}

/* Heads of one key head share a unit, in equal parts, while all of their query rows fit. */
static int heads_together(const dhp_attention *args, int rows) {
  const int64_t heads_per_key_head = args->q.size[1] / args->k.size[1];
  int heads = 1;
  while (heads_per_key_head % (2 * heads) == 0 && 2 * heads * args->q.size[2] <= rows)
    heads *= 2;
  return heads;
}

int dhp_decode_is_planned(const dhp_plan *plan) {
  const dhp_kernel_info *const first = dhp_family_decode.kernels;
  return plan->kernel >= first && plan->kernel < first + dhp_family_decode.count;
}

/* With this kernel: the plan, and its cycles; negative if it cannot be. */
static double planned(const dhp_attention *args, int64_t key_tiles, const dhp_kernel_info *kernel,
                      const dhp_kernel_info *forward, dhp_plan *plan) {
  const int64_t *const q = args->q.size;
  const int heads = heads_together(args, kernel->tile_q);
  const int64_t segments = ceil_div(key_tiles, kernel->segment_tiles);
  if (segments > INT32_MAX || (segments > 1 && kernel->segment_tiles != forward->segment_tiles)) return -1.;
  const int splits = segments > 1 ? (int)segments : 1;
  const int64_t q_tiles = ceil_div(q[2], kernel->tile_q / heads), units = q[0] * q[1] / heads * q_tiles * splits;
  const int64_t parts = splits > 1 ? units * kernel->tile_q : 0;
  if (!dhp_fold_can_split(parts, key_tiles)) return -1.;
  const double tiles = (double)(splits > 1 ? kernel->segment_tiles : key_tiles); /* of a unit */
  const double rounds = (double)ceil_div(units, clusters_at_a_time(kernel->cluster));
  const double loads = (double)units * tiles * kernel->tile_k * 4 * kernel->head_dim / BYTES_PER_CYCLE;
  const double fold = splits > 1 ? dhp_fold_cycles(parts, kernel->head_dim) : 0.;
  *plan = (dhp_plan){.kernel = kernel,
                     .grid = units * kernel->cluster,
                     .heads_per_tile = heads,
                     .q_tiles = q_tiles,
                     .items = units,
                     .splits = splits,
                     .parts = parts};
  return rounds * (kernel->unit_cycles + tiles * kernel->step_cycles) + loads + fold;
}

int dhp_decode_plan(const dhp_attention *args, const dhp_mask *mask, const dhp_kernel_info *forward, double cycles,
                    dhp_plan *plan) {
  const int64_t key_tiles = ceil_div(dhp_mask_keys_seen(mask), forward->tile_k);
  int found = 0;
  for (int i = 0; i < dhp_family_decode.count; i++) {
    const dhp_kernel_info *const kernel = &dhp_family_decode.kernels[i];
    if (kernel->dtype != forward->dtype || kernel->head_dim != forward->head_dim) continue;
    dhp_plan one;
    const double of_one = planned(args, key_tiles, kernel, forward, &one);
    if (of_one < 0. || of_one >= cycles) continue;
    cycles = of_one;
    *plan = one;
    found = 1;
  }
  return found;
}
