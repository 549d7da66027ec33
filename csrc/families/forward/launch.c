/* launch.c - the forward's tensor maps and parameters, and its launch. */
#include "launch.h"

#include "../../cuda/session.h"
#include "../../hopper/chip.h"
#include "../../hopper/log2.h"
#include "../../hopper/softmax_scale.h"
#include "../../mask.h"
#include "../fold/launch.h"
#include "../fold/parts.h"
#include "params.h"
#include "schedule.h"

/*
 * Keys that no query sees are cut off: TMA then reads zeros, and whatever they hold (a NaN in an unused part of a
 * cache) cannot meet a probability of 0. Without a single key the kernel still visits one tile, wholly masked: any
 * readable tensor serves as k and v.
 */
static dhp_status encode_maps(const dhp_session *session, const dhp_attention *args, const dhp_mask *mask,
                              const dhp_plan *plan, int rows, dhp_tensor_map maps[3], dhp_error *error) {
  const int64_t seen = dhp_mask_keys_seen(mask), length = seen > 0 ? seen : 1;
  const dhp_tensor *const k = seen > 0 ? &args->k : &args->q, *const v = seen > 0 ? &args->v : &args->q;
  const int tile_k = plan->kernel->tile_k;
  dhp_status status =
      dhp_tensor_map_encode(session, &maps[0], &args->q, args->q.size[2], rows, plan->heads_per_tile, error);
  if (status == DHP_OK) status = dhp_tensor_map_encode(session, &maps[1], k, length, tile_k, 1, error);
  if (status == DHP_OK) status = dhp_tensor_map_encode(session, &maps[2], v, length, tile_k, 1, error);
  return status;
}

dhp_fwd_params dhp_forward_params(const dhp_attention *args, int rows) {
  const dhp_softmax_scale by = dhp_softmax_scale_of(args->scale);
  return (dhp_fwd_params){
      .out = args->out.data,
      .out_stride = {args->out.stride[0], args->out.stride[1], args->out.stride[2]},
      .lse = args->lse,
      .batch = (int32_t)args->q.size[0],
      .heads = (int32_t)args->q.size[1],
      .heads_per_key_head = (int32_t)(args->q.size[1] / args->k.size[1]),
      .seqlen_q = (int32_t)args->q.size[2],
      .head_dim = (int32_t)args->q.size[3],
      .log2_rows = dhp_log2_of(rows),
      .scale = by.scale,
      .scale_log2 = by.scale_log2,
      .highest_score = by.highest_score,
      .scale_to_power_of_two = by.scale_to_power_of_two,
      .zero = 0,
  };
}

static dhp_fwd_params params_of(const dhp_attention *args, const dhp_mask *mask, const dhp_plan *plan, int rows) {
  dhp_fwd_params params = dhp_forward_params(args, rows);
  params.seqlen_k = (int32_t)dhp_mask_keys_seen(mask);
  params.highest = (int32_t)mask->highest;
  dhp_set_schedule(&params, args, plan);
  const dhp_parts parts = dhp_parts_at(args->workspace, plan->parts, plan->kernel->head_dim);
  params.part_out = parts.out;
  params.part_sums = parts.sums;
  return params;
}

dhp_status dhp_forward_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                              dhp_error *error) {
  dhp_session session;
  dhp_status status = dhp_session_begin(&session, device, error);
  if (status != DHP_OK) return status;
  const int rows = plan->kernel->rows / plan->heads_per_tile; /* of one head, in a warpgroup */
  dhp_tensor_map maps[3];
  const dhp_mask mask = dhp_mask_of(args);
  status = encode_maps(&session, args, &mask, plan, rows, maps, error);
  if (status == DHP_OK) {
    dhp_fwd_params params = params_of(args, &mask, plan, rows);
    dhp_fwd_window window = {.lowest = (int32_t)mask.lowest};
    void *arguments[] = {&maps[0], &maps[1], &maps[2], &params, &window}; /* the last of those with a window */
    /* A larger launch would be spread unevenly over multiprocessors that are still partly taken. */
    const int may_overlap = plan->grid <= DHP_MULTIPROCESSORS;
    status = dhp_session_launch(&session, plan->kernel, plan->grid, arguments, may_overlap, stream, error);
    if (status == DHP_OK && plan->splits > 1) status = dhp_fold_launch(&session, args, plan, stream, error);
  }
  dhp_session_end(&session);
  return status;
}
