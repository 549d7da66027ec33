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
  const int64_t tiles = ceil_div(dhp_mask_row(mask, last_row).last, tile_k) - dhp_mask_row(mask, row).first / tile_k;
  return tiles > 1 ? tiles : 1;
}

/* The first row of the first query tile whose window begins behind key 0, or of the last one: of those whose windows
 * are all there, if there are any. */
static int64_t row_of_whole_window(const dhp_mask *mask, int64_t q_tiles, int rows) {
  const int64_t tile = mask->lowest < 0 ? ceil_div(-mask->lowest, rows) : 0;
  return (tile < q_tiles - 1 ? tile : q_tiles - 1) * rows;
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
  int64_t shortest, longest; /* query tile, in key tiles; of windows those that are cut off, and the others */
  int64_t segments;          /* that the keys of the longest query tile are in */
  int hides_first;           /* keys, from some rows */
} work;

static work work_of(const dhp_attention *args, const dhp_mask *mask, const dhp_kernel_info *kernel) {
  const sharing by = share(args, kernel);
  const int rows = kernel->tile_q / by.heads_per_tile, hides_first = dhp_mask_hides_first(mask);
  const int64_t last = (by.q_tiles - 1) * rows;
  const int64_t of_longest = hides_first ? row_of_whole_window(mask, by.q_tiles, rows) : last;
  const int64_t longest = visits(mask, of_longest, rows, kernel->tile_k);
  return (work){.by = by,
                .tiles = by.groups * by.q_tiles,
                .at_a_time = (int64_t)DHP_MULTIPROCESSORS * kernel->ctas_per_sm,
                .shortest = visits(mask, 0, rows, kernel->tile_k),
                .longest = longest,
                .segments = hides_first ? 1 : ceil_div(longest, kernel->segment_tiles),
                .hides_first = hides_first};
}

/*
 * About how many cycles the launch takes. Query tiles that are equally long go in rounds, and the last round may be
 * short; others are dealt so that all CTAs end at about the same time, but none before its longest. Of windows nearly
 * all are as long as the longest.
 */
static double cost_of(const work *w, const dhp_kernel_info *kernel) {
  double steps;
  if (w->tiles > w->at_a_time && w->shortest < w->longest) {
    const double mean = w->hides_first ? (double)w->longest : (double)(w->shortest + w->longest) / 2.;
    const double each = (double)w->tiles / (double)w->at_a_time * mean;
    const double least = (double)w->longest / kernel->ctas_per_sm;
    steps = each > least ? each : least;
  } else {
    const double rounds =
        (double)(w->tiles / w->at_a_time) + share_of_step(w->tiles % w->at_a_time, kernel->ctas_per_sm);
    steps = rounds * (double)w->longest;
  }
  return steps * kernel->step_cycles;
}

/* The same if every segment of a query tile is the work of another CTA; infinite if that cannot be. */
static double cost_of_split(const work *w, const dhp_kernel_info *kernel) {
  const int64_t items = w->tiles * w->segments, parts = items * kernel->tile_q;
  if (w->segments < 2 || items > DHP_CUDA_MAX_ITEMS || !dhp_fold_can_split(parts, w->longest)) return INFINITY;
  const double rounds = (double)(items / w->at_a_time) + share_of_step(items % w->at_a_time, kernel->ctas_per_sm);
  return rounds * kernel->segment_tiles * kernel->step_cycles + dhp_fold_cycles(parts, kernel->head_dim);
}

/* A kernel, whether it splits key segments, and about how many cycles it takes. */
typedef struct choice {
  const dhp_kernel_info *kernel;
  int is_split;
  double cycles;
} choice;

static choice choose_kernel(const dhp_attention *args, const dhp_mask *mask, int head_dim, const char *part) {
  choice best = {NULL, 0, INFINITY};
  for (int i = 0; i < dhp_family_forward.count; i++) {
    const dhp_kernel_info *const kernel = &dhp_family_forward.kernels[i];
    if (kernel->dtype != args->q.dtype || kernel->head_dim != head_dim || strcmp(kernel->part, part) != 0) continue;
    const work w = work_of(args, mask, kernel);
    if (kernel->is_short && w.segments > 1) continue;
    const double whole = cost_of(&w, kernel), split = cost_of_split(&w, kernel);
    if (!best.kernel || whole < best.cycles) best = (choice){kernel, 0, whole};
    if (split < best.cycles) best = (choice){kernel, 1, split};
  }
  return best;
}

/*
 * How query tiles are dealt to CTAs, see query_tiles.cuh. Without a mask all are equally long: in order. Under a causal
 * mask mirrored pairs in order, and the last LISTED_ROUNDS or more from the list; everything from the list if there are
 * few rounds, or the last of them would be too uneven. Windows that end early, too: what their last round lacks, the
 * tiles that key 0 cuts off fill up, which come last.
 */
static void deal(const dhp_attention *args, const work *w, dhp_plan *plan) {
  const int ends_early = (args->is_causal || (args->is_windowed && args->window_right >= 0)) && w->by.q_tiles > 1;
  plan->mirrored = ends_early && !w->hides_first;
  if (ends_early && w->hides_first) plan->listed_groups = w->by.groups;
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
  plan->heads_per_tile = w.by.heads_per_tile;
  plan->q_tiles = w.by.q_tiles;
  plan->splits = is_split ? (int)w.segments : 1;
  if (is_split)
    plan->items = w.tiles * w.segments;
  else
    deal(args, &w, plan);
  plan->grid = plan->items < w.at_a_time ? plan->items : w.at_a_time;
  if (w.segments > 1) plan->parts = (is_split ? plan->items : plan->grid) * plan->kernel->tile_q;
}

/* Kernels of windows compute rows that have one segment. */
static dhp_status check_chains(const dhp_attention *args, const dhp_mask *mask, const dhp_kernel_info *kernel,
                               dhp_error *error) {
  const int64_t most = (int64_t)kernel->segment_tiles * kernel->tile_k;
  if (!dhp_mask_hides_first(mask) || dhp_mask_keys_seen(mask) <= most || dhp_window_is_within(args, most))
    return DHP_OK;
  return dhp_fail(
      error, DHP_UNSUPPORTED,
      "window: (%lld, %lld), with %lld keys seen; supported on CUDA: up to %lld keys, or left + 1 + right no more "
      "than that, " DHP_BY_PACKED,
      (long long)args->window_left, (long long)args->window_right, (long long)dhp_mask_keys_seen(mask),
      (long long)most);
}

dhp_status dhp_plan_attention(const dhp_attention *args, dhp_plan *plan, dhp_error *error) {
  *plan = (dhp_plan){0};
  dhp_status status = dhp_check_arguments(args, error);
  if (status != DHP_OK) return status;

  const int64_t *const q = args->q.size;
  status = dhp_check_cuda_call(args, error);
  if (status != DHP_OK) return status;
  const dhp_mask mask = dhp_mask_of(args);
  const char *const part = dhp_mask_hides_first(&mask) ? "window out" : "out";
  const dhp_kernel_info *const fitting = dhp_family_kernel(&dhp_family_forward, args->q.dtype, q[3], part);
  if (!fitting)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: head_dim %lld; no forward kernel of this build serves it",
                    (long long)q[3]);
  if (q[0] == 0 || q[1] == 0 || q[2] == 0) return DHP_OK;
  status = check_chains(args, &mask, fitting, error);
  if (status != DHP_OK) return status;

  status = dhp_check_cuda_heads(args, error);
  if (status != DHP_OK) return status;
  const int head_dim = fitting->head_dim, rows = least_rows(head_dim);
  if (q[0] * q[1] * ceil_div(q[2], rows) > DHP_CUDA_MAX_ITEMS)
    return dhp_fail(error, DHP_UNSUPPORTED,
                    "q: %lld heads in the batch of %lld tiles of %d rows; supported on CUDA: up to %d tiles in all",
                    (long long)(q[0] * q[1]), (long long)ceil_div(q[2], rows), rows, DHP_CUDA_MAX_ITEMS);

  const choice best = choose_kernel(args, &mask, head_dim, part);
  if (!best.kernel) /* in a build of few kernels */
    return dhp_fail(error, DHP_UNSUPPORTED, "k: %lld keys; no forward kernel of this build serves so many",
                    (long long)args->k.size[2]);
  if (!dhp_mask_hides_first(&mask) && dhp_decode_plan(args, &mask, best.kernel, best.cycles, plan)) return DHP_OK;
  plan->kernel = best.kernel;
  plan_with(args, &mask, best.is_split, plan);
  return DHP_OK;
}
