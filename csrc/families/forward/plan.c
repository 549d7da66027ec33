/*
 * plan.c - public shape to launch: which kernel, how many CTAs, in which order.
 *
 * A plan may choose how many query rows, and of how many heads, share a CTA, and whether a row's key segments are the
 * work of one CTA or of several, because that changes no output bit; it may not choose another key tile or segment for
 * a head_dim, because that would. It never looks at a value.
 */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "../../check.h"
#include "../../error.h"
#include "../../hopper/chip.h"
#include "../../kernels/kernel_table.h"
#include "../../mask.h"
#include "../decode/launch.h"
#include "../fold/launch.h"

/* The kernels of this family. Those of decode serve a forward, too, with the same bits. */
extern const dhp_family dhp_family_forward;

enum {
  /* Up to so many rounds of tiles a longest-first list of all is more even than mirrored pairs and a list; by
   * calculation, as are the one and a half rounds that are listed otherwise. */
  FEW_ROUNDS = 5,
  TWICE_LISTED_ROUNDS = 3
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Fewest query rows of a tile among the kernels of this head_dim. */
static int least_rows(int head_dim) {
  int least = INT_MAX;
  for (int i = 0; i < dhp_family_forward.count; i++) {
    const dhp_kernel_info *const kernel = &dhp_family_forward.kernels[i];
    if (kernel->head_dim == head_dim && kernel->tile_q < least) least = kernel->tile_q;
  }
  return least;
}

/* How a kernel would share out the work of a call. */
typedef struct sharing {
  int heads_per_tile;
  int64_t groups, q_tiles; /* head groups of all batches; query tiles of one of them */
} sharing;

/* Heads of one key head share a tile, in equal parts, while all of their query rows fit those of a warpgroup. */
static sharing share(const dhp_attention *args, const dhp_kernel_info *kernel) {
  const int64_t *const q = args->q.size;
  const int64_t heads_per_key_head = q[1] / args->k.size[1];
  int heads = 1;
  while (heads_per_key_head % (2 * heads) == 0 && 2 * heads * q[2] <= kernel->rows)
    heads *= 2;
  return (sharing){heads, q[0] * q[1] / heads, ceil_div(q[2], kernel->tile_q / heads)};
}

/* Key tiles that a query tile visits, the first of whose rows is this one: at least one. */
static int64_t visits(const dhp_mask *mask, int64_t row, int rows, int tile_k) {
  const int64_t last_row = row + rows < mask->queries ? row + rows - 1 : mask->queries - 1;
  const int64_t tiles = ceil_div(dhp_mask_row(mask, last_row).last, tile_k);
  return tiles > 1 ? tiles : 1;
}

/* Of the time that a multiprocessor full of CTAs takes for a step of each, what it takes where the launch has so many
 * CTAs; a lone one overlaps with nobody. */
static double share_of_step(int64_t ctas, int ctas_per_sm) {
  const int64_t together = ceil_div(ctas, DHP_MULTIPROCESSORS);
  return ctas == 0 ? 0. : (1. + (double)together) / (1. + ctas_per_sm);
}

/* The work of a call, as one kernel would share it out. */
typedef struct work {
  sharing by;
  int64_t tiles, at_a_time;  /* query tiles; CTAs */
  int64_t shortest, longest; /* query tile, in key tiles */
} work;

static work work_of(const dhp_attention *args, const dhp_mask *mask, const dhp_kernel_info *kernel) {
  const sharing by = share(args, kernel);
  const int rows = kernel->tile_q / by.heads_per_tile;
  return (work){.by = by,
                .tiles = by.groups * by.q_tiles,
                .at_a_time = (int64_t)DHP_MULTIPROCESSORS * kernel->ctas_per_sm,
                .shortest = visits(mask, 0, rows, kernel->tile_k),
                .longest = visits(mask, (by.q_tiles - 1) * rows, rows, kernel->tile_k)};
}

/*
 * About how many cycles the launch takes. Query tiles that are equally long go in rounds, and the last round may be
 * short; others are dealt so that all CTAs end at about the same time, but none before its longest.
 */
static double cost_of(const work *w, const dhp_kernel_info *kernel) {
  double steps;
  if (w->tiles > w->at_a_time && w->shortest < w->longest) {
    const double each = (double)w->tiles / (double)w->at_a_time * (double)(w->shortest + w->longest) / 2.;
    const double least = (double)w->longest / kernel->ctas_per_sm;
    steps = each > least ? each : least;
  } else {
    const double rounds =
        (double)(w->tiles / w->at_a_time) + share_of_step(w->tiles % w->at_a_time, kernel->ctas_per_sm);
    steps = rounds * (double)w->longest;
  }
  return steps * kernel->step_cycles;
}

/* Segments that the keys of the longest query tile are in. */
static int64_t segments_of(const work *w, const dhp_kernel_info *kernel) {
  return ceil_div(w->longest, kernel->segment_tiles);
}

/* The same if every segment of a query tile is the work of another CTA; infinite if that cannot be. */
static double cost_of_split(const work *w, const dhp_kernel_info *kernel) {
  const int64_t items = w->tiles * segments_of(w, kernel), parts = items * kernel->tile_q;
  if (segments_of(w, kernel) < 2 || items > DHP_CUDA_MAX_ITEMS || !dhp_fold_can_split(parts, w->longest))
    return INFINITY;
  const double rounds = (double)(items / w->at_a_time) + share_of_step(items % w->at_a_time, kernel->ctas_per_sm);
  return rounds * kernel->segment_tiles * kernel->step_cycles + dhp_fold_cycles(parts, kernel->head_dim);
}

/* A kernel, whether it splits key segments, and about how many cycles it takes. */
typedef struct choice {
  const dhp_kernel_info *kernel;
  int is_split;
  double cycles;
} choice;

static choice choose_kernel(const dhp_attention *args, const dhp_mask *mask, int head_dim) {
  choice best = {NULL, 0, INFINITY};
  for (int i = 0; i < dhp_family_forward.count; i++) {
    const dhp_kernel_info *const kernel = &dhp_family_forward.kernels[i];
    if (kernel->dtype != args->q.dtype || kernel->head_dim != head_dim || strcmp(kernel->part, "out") != 0) continue;
    const work w = work_of(args, mask, kernel);
    if (kernel->is_short && segments_of(&w, kernel) > 1) continue;
    const double whole = cost_of(&w, kernel), split = cost_of_split(&w, kernel);
    if (!best.kernel || whole < best.cycles) best = (choice){kernel, 0, whole};
    if (split < best.cycles) best = (choice){kernel, 1, split};
  }
  return best;
}

/*
 * How query tiles are dealt to CTAs, see query_tiles.cuh. Without a mask all are equally long: in order. Under a causal
 * mask mirrored pairs in order, and the last LISTED_ROUNDS or more from the list; everything from the list if there are
 * few rounds, or the last of them would be too uneven.
 */
static void deal(const dhp_attention *args, const work *w, dhp_plan *plan) {
  plan->mirrored = args->is_causal && w->by.q_tiles > 1;
  if (plan->mirrored) {
    const int64_t few = w->tiles <= FEW_ROUNDS * w->at_a_time;
    const int64_t listed = few ? w->by.groups : ceil_div(TWICE_LISTED_ROUNDS * w->at_a_time, 2 * w->by.q_tiles);
    plan->listed_groups = listed + (w->by.groups - listed) % 2;
  }
  const int64_t listed_items = plan->listed_groups * w->by.q_tiles;
  plan->items = listed_items + ((w->tiles - listed_items) >> plan->mirrored);
}

/* The rest of the plan, from its kernel on. Segments that are split are dealt in order, like head groups. */
static void plan_with(const dhp_attention *args, const dhp_mask *mask, int is_split, dhp_plan *plan) {
  const work w = work_of(args, mask, plan->kernel);
  const int64_t segments = segments_of(&w, plan->kernel);
  plan->heads_per_tile = w.by.heads_per_tile;
  plan->q_tiles = w.by.q_tiles;
  plan->splits = is_split ? (int)segments : 1;
  if (is_split)
    plan->items = w.tiles * segments;
  else
    deal(args, &w, plan);
  plan->grid = plan->items < w.at_a_time ? plan->items : w.at_a_time;
  if (segments > 1) plan->parts = (is_split ? plan->items : plan->grid) * plan->kernel->tile_q;
}

dhp_status dhp_plan_attention(const dhp_attention *args, dhp_plan *plan, dhp_error *error) {
  *plan = (dhp_plan){0};
  dhp_status status = dhp_check_arguments(args, error);
  if (status != DHP_OK) return status;

  const int64_t *const q = args->q.size;
  status =
      dhp_check_cuda_call(args, error); /* no window: kernels count keys from key 0, end rows early if causal alone */
  if (status != DHP_OK) return status;
  const dhp_kernel_info *const fitting = dhp_family_kernel(&dhp_family_forward, args->q.dtype, q[3], "out");
  if (!fitting)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: head_dim %lld; no forward kernel of this build serves it",
                    (long long)q[3]);
  if (q[0] == 0 || q[1] == 0 || q[2] == 0) return DHP_OK;

  status = dhp_check_cuda_heads(args, error);
  if (status != DHP_OK) return status;
  const int head_dim = fitting->head_dim, rows = least_rows(head_dim);
  if (q[0] * q[1] * ceil_div(q[2], rows) > DHP_CUDA_MAX_ITEMS)
    return dhp_fail(error, DHP_UNSUPPORTED,
                    "q: %lld heads in the batch of %lld tiles of %d rows; supported on CUDA: up to %d tiles in all",
                    (long long)(q[0] * q[1]), (long long)ceil_div(q[2], rows), rows, DHP_CUDA_MAX_ITEMS);

  const dhp_mask mask = dhp_mask_of(args);
  const choice best = choose_kernel(args, &mask, head_dim);
  if (dhp_decode_plan(args, &mask, best.kernel, best.cycles, plan)) return DHP_OK;
  plan->kernel = best.kernel;
  plan_with(args, &mask, best.is_split, plan);
  return DHP_OK;
}
