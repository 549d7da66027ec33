/* launch.c - fold's parameters and launch. */
#include "launch.h"

#include "../../hopper/log2.h"
#include "../../hopper/softmax_scale.h"
#include "../../kernels/kernel_table.h"
#include "../../mask.h"
#include "params.h"
#include "parts.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_fold;

/* A launch that begins while the one before it ends; bytes that are written and read in a cycle, through the L2 cache.
 * By the times of the first shapes that were split, on an H100. */
static const double ENDS = 4000., BYTES_PER_CYCLE = 1500.;

double dhp_fold_cycles(int64_t parts, int head_dim) { return ENDS + 8. * (double)parts * head_dim / BYTES_PER_CYCLE; }

int dhp_fold_can_split(int64_t parts, int64_t key_tiles) {
  return parts <= INT32_MAX && key_tiles < DHP_NOT_SEEN_TILES;
}

dhp_status dhp_fold_launch(const dhp_session *session, const dhp_attention *args, const dhp_plan *plan, void *stream,
                           dhp_error *error) {
  const dhp_kernel_info *const made_by = plan->kernel;
  const dhp_kernel_info *const kernel = dhp_family_kernel(&dhp_family_fold, made_by->dtype, made_by->head_dim, "fold");
  const dhp_mask mask = dhp_mask_of(args);
  const dhp_softmax_scale by = dhp_softmax_scale_of(args->scale);
  const dhp_parts parts = dhp_parts_at(args->workspace, plan->parts, made_by->head_dim);
  const int64_t *const q = args->q.size, rows = q[0] * q[1] * q[2];
  dhp_fold_params params = {
      .part_out = parts.out,
      .part_sums = parts.sums,
      .out = args->out.data,
      .out_stride = {args->out.stride[0], args->out.stride[1], args->out.stride[2]},
      .lse = args->lse,
      .heads = (int32_t)q[1],
      .seqlen_q = (int32_t)q[2],
      .seqlen_k = (int32_t)dhp_mask_keys_seen(&mask),
      .head_dim = (int32_t)q[3],
      .highest = (int32_t)mask.highest,
      .rows = (int32_t)rows,
      .splits = plan->splits,
      .place_rows = made_by->tile_q,
      .group_rows = made_by->rows,
      .log2_rows = dhp_log2_of(made_by->rows / plan->heads_per_tile),
      .q_tiles = (int32_t)plan->q_tiles,
      .heads_per_group = plan->heads_per_tile,
      .tile_rows = made_by->tile_q / plan->heads_per_tile,
      .by_seqlen_q = dhp_divisor_of(q[2]),
      .by_heads = dhp_divisor_of(q[1]),
      .by_tile_rows = dhp_divisor_of(made_by->tile_q / plan->heads_per_tile),
      .by_heads_per_group = dhp_divisor_of(plan->heads_per_tile),
      .scale = by.scale,
      .scale_log2 = by.scale_log2,
      .highest_score = by.highest_score,
      .scale_to_power_of_two = by.scale_to_power_of_two,
  };
  void *arguments[] = {&params};
  /* it waits for all parts: where its CTAs stand meanwhile, nothing else is to begin */
  return dhp_session_launch(session, kernel, (rows + kernel->rows - 1) / kernel->rows, arguments, 1, stream, error);
}
