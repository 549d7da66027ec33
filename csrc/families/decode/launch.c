/* launch.c - the decode kernel's tensor maps and parameters, and its launch. */
#include "launch.h"

#include "../../cuda/session.h"
#include "../../hopper/chip.h"
#include "../../hopper/log2.h"
#include "../../hopper/softmax_scale.h"
#include "../fold/launch.h"
#include "../fold/parts.h"
#include "params.h"

/*
 * Keys that no query sees are cut off: TMA then reads zeros, whatever they hold. Without a single key the kernel still
 * visits one tile, wholly masked: any readable tensor serves as k and v.
 */
static dhp_status encode_maps(const dhp_session *session, const dhp_attention *args, int64_t seen,
                              const dhp_kernel_info *kernel, dhp_tensor_map maps[2], dhp_error *error) {
  const int strip = kernel->head_dim / kernel->cluster;
  const int64_t length = seen > 0 ? seen : 1;
  const dhp_tensor *const k = seen > 0 ? &args->k : &args->q, *const v = seen > 0 ? &args->v : &args->q;
  const int box = DHP_DECODE_BOX_COLUMNS(kernel->warpgroups, kernel->stages, strip);
  const dhp_status status = dhp_tensor_map_encode_strips(session, &maps[0], k, length, box, kernel->tile_k, error);
  if (status != DHP_OK) return status;
  return dhp_tensor_map_encode_strips(session, &maps[1], v, length, strip, kernel->tile_k, error);
}

static dhp_decode_params params_of(const dhp_attention *args, const dhp_mask *mask, const dhp_plan *plan) {
  const int64_t *const q = args->q.size, groups = q[1] / plan->heads_per_tile;
  const dhp_softmax_scale by = dhp_softmax_scale_of(args->scale);
  const dhp_parts parts = dhp_parts_at(args->workspace, plan->parts, plan->kernel->head_dim);
  return (dhp_decode_params){
      .q = args->q.data,
      .q_stride = {args->q.stride[0], args->q.stride[1], args->q.stride[2]},
      .out = args->out.data,
      .out_stride = {args->out.stride[0], args->out.stride[1], args->out.stride[2]},
      .lse = args->lse,
      .heads = (int32_t)q[1],
      .seqlen_q = (int32_t)q[2],
      .seqlen_k = (int32_t)dhp_mask_keys_seen(mask),
      .head_dim = (int32_t)q[3],
      .highest = (int32_t)mask->highest,
      .part_out = parts.out,
      .part_sums = parts.sums,
      .splits = plan->splits,
      .log2_rows = dhp_log2_of(plan->kernel->tile_q / plan->heads_per_tile),
      .head_groups = (int32_t)(groups * plan->splits),
      .q_tiles = (int32_t)plan->q_tiles,
      .by_q_tiles = dhp_divisor_of(plan->q_tiles),
      .by_head_groups = dhp_divisor_of(groups * plan->splits),
      .by_splits = dhp_divisor_of(plan->splits),
      .by_heads_per_key_head = dhp_divisor_of(q[1] / args->k.size[1]),
      .scale = by.scale,
      .scale_log2 = by.scale_log2,
      .highest_score = by.highest_score,
      .scale_to_power_of_two = by.scale_to_power_of_two,
      .zero = 0,
  };
}

dhp_status dhp_decode_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                             dhp_error *error) {
  dhp_session session;
  dhp_status status = dhp_session_begin(&session, device, error);
  if (status != DHP_OK) return status;
  dhp_tensor_map maps[2];
  const dhp_mask mask = dhp_mask_of(args);
  status = encode_maps(&session, args, dhp_mask_keys_seen(&mask), plan->kernel, maps, error);
  if (status == DHP_OK) {
    dhp_decode_params params = params_of(args, &mask, plan);
    void *arguments[] = {&maps[0], &maps[1], &params};
    const int may_overlap = plan->grid <= DHP_MULTIPROCESSORS;
    status = dhp_session_launch(&session, plan->kernel, plan->grid, arguments, may_overlap, stream, error);
    if (status == DHP_OK && plan->splits > 1) status = dhp_fold_launch(&session, args, plan, stream, error);
  }
  dhp_session_end(&session);
  return status;
}
