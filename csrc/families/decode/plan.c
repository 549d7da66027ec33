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
 * Cycles of a round of clusters beside the chain of P v, and how many more for each CTA of a cluster, which begin and
 * end together; bytes of k and v that all units together get in a cycle. Fitted to 315 shapes on an H200
 * (benchmarks/results/kernel_choice/h200_decode.json), as are the chain's cycles in family.py.
 */
static const double ENDS = 11000., ENDS_OF_CTA = 1300., BYTES_PER_CYCLE = 4000.;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int cluster_of(const dhp_kernel_info *kernel) { return kernel->head_dim / DHP_DECODE_STRIP; }

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

int dhp_decode_plan(const dhp_attention *args, const dhp_mask *mask, const dhp_kernel_info *forward, double cycles,
                    dhp_plan *plan) {
  const int64_t *const q = args->q.size, keys = dhp_mask_keys_seen(mask);
  const dhp_kernel_info *const kernel = dhp_family_kernel(&dhp_family_decode, args->q.dtype, forward->head_dim, "out");
  if (!kernel) return 0;
  const int heads = heads_together(args, kernel->tile_q);
  const int64_t key_tiles = ceil_div(keys, kernel->tile_k), segments = ceil_div(key_tiles, kernel->segment_tiles);
  if (segments > INT32_MAX || (segments > 1 && kernel->segment_tiles != forward->segment_tiles)) return 0;
  const int splits = segments > 1 ? (int)segments : 1;
  const int64_t q_tiles = ceil_div(q[2], kernel->tile_q / heads), units = q[0] * q[1] / heads * q_tiles * splits;
  const int64_t parts = splits > 1 ? units * kernel->tile_q : 0;
  if (!dhp_fold_can_split(parts, key_tiles)) return 0;
  const int cluster = cluster_of(kernel);
  const double tiles = (double)(splits > 1 ? kernel->segment_tiles : key_tiles); /* of a unit */
  const double rounds = (double)ceil_div(units, clusters_at_a_time(cluster));
  const double loads = (double)units * tiles * kernel->tile_k * 4 * kernel->head_dim / BYTES_PER_CYCLE;
  const double fold = splits > 1 ? dhp_fold_cycles(parts, kernel->head_dim) : 0.;
  if (rounds * (ENDS + cluster * ENDS_OF_CTA + tiles * kernel->step_cycles) + loads + fold >= cycles) return 0;
  *plan = (dhp_plan){.kernel = kernel,
                     .grid = units * cluster,
                     .heads_per_tile = heads,
                     .q_tiles = q_tiles,
                     .items = units,
                     .splits = splits,
                     .parts = parts};
  return 1;
}
