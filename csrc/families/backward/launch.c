/* launch.c - the backward's tensor maps and parameters, and its launches. */
#include "launch.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "../../cuda/session.h"
#include "../../hopper/chip.h"
#include "../../mask.h"
#include "../bounds/launch.h"
#include "../delta/launch.h"
#include "../dq_out/launch.h"
#include "params.h"
#include "workspace.h"

#define LOG2_E 1.44269504088896341

/* The maps of a kernel, in the order of its arguments. */
enum { OWN_S, OWN_DP, WALK_S, WALK_DP, STATISTICS, MAPS };

/* A tensor, and how many of its rows a kernel is to see. */
typedef struct side {
  const dhp_tensor *s, *dp; /* the tensors of S and of dP */
  int64_t length;
} side;

/*
 * Where a dS of 0 would meet them, for dq, keys that no query sees are cut off: TMA then reads zeros, whatever they
 * hold. A walked side without rows is never read: any readable tensor serves.
 */
static void sides_of(const dhp_backward *args, const dhp_mask *mask, int owns_keys, int with_dq, side *own,
                     side *walk) {
  const dhp_attention *const forward = &args->forward;
  const side queries = {&forward->q, &args->grad_out, forward->q.size[2]};
  side keys = {&forward->k, &forward->v, forward->k.size[2]};
  if (with_dq) keys.length = dhp_mask_keys_seen(mask);
  *own = owns_keys ? keys : queries;
  *walk = owns_keys ? queries : keys;
  if (own->length == 0) own->length = 1; /* read, and not used */
  if (walk->length == 0 || walk->s->size[1] == 0) *walk = *own;
}

static dhp_status encode_maps(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                              const side *own, const side *walk, dhp_tensor_map maps[MAPS], dhp_error *error) {
  const int64_t *const q = args->forward.q.size;
  const int64_t rows = q[0] * q[1], columns = 4 * dhp_delta_pairs(args);
  const struct {
    const dhp_tensor *tensor;
    int64_t length;
    int rows;
  } boxes[] = {{own->s, own->length, kernel->rows},
               {own->dp, own->length, kernel->rows},
               {walk->s, walk->length, kernel->tile_k},
               {walk->dp, walk->length, kernel->tile_k}};
  dhp_status status = DHP_OK;
  for (int i = OWN_S; i <= WALK_DP && status == DHP_OK; i++)
    status = dhp_tensor_map_encode(session, &maps[i], boxes[i].tensor, boxes[i].length, boxes[i].rows, 1, error);
  if (status != DHP_OK || rows * columns == 0) return status; /* without queries nothing is walked, no map is read */
  return dhp_tensor_map_encode_floats(session, &maps[STATISTICS], args->workspace, rows, columns, 2 * kernel->tile_k,
                                      error);
}

static void set_output(const dhp_tensor *gradient, void **data, int64_t stride[3]) {
  *data = gradient->data;
  for (int i = 0; i < 3; i++)
    stride[i] = gradient->stride[i];
}

/*
 * How many heads go in the list of walk.cuh: none unless walks differ in length, else as many as make up two CTAs for
 * each multiprocessor. So the list takes longer than the longest walk of the heads before, and balances what they
 * leave. Three or more fit the L2 cache less well and are slower (H100, head_dim 64 to 256).
 */
enum { LISTED_CTAS = 2 * DHP_MULTIPROCESSORS };

static void set_order(dhp_bwd_params *params, int64_t heads_of_all) {
  const int64_t enough = (LISTED_CTAS + params->own_tiles - 1) / params->own_tiles;
  params->listed_heads = params->is_causal ? (int32_t)(enough < heads_of_all ? enough : heads_of_all) : 0;
  params->ordered_heads = (int32_t)heads_of_all - params->listed_heads;
  params->by_own_tiles = dhp_divisor_of(params->own_tiles);
  params->by_listed_heads = dhp_divisor_of(params->listed_heads);
  params->by_own_heads = dhp_divisor_of(params->own_heads);
  params->by_heads_per_key_head = dhp_divisor_of(params->heads_per_key_head);
}

static dhp_status launch(const dhp_session *session, const dhp_backward *args, const dhp_launch *what, void *stream,
                         dhp_error *error) {
  const dhp_kernel_info *const kernel = what->kernel;
  const dhp_attention *const forward = &args->forward;
  const dhp_mask mask = dhp_mask_of(forward);
  const int owns_keys = strcmp(kernel->part, "dq") != 0, with_dq = strchr(kernel->part, 'q') != NULL;
  side own, walk;
  sides_of(args, &mask, owns_keys, with_dq, &own, &walk);
  dhp_tensor_map maps[MAPS] = {0};
  const dhp_status status = encode_maps(session, args, kernel, &own, &walk, maps, error);
  if (status != DHP_OK) return status;
  const int64_t *const owned = own.s->size;
  const dhp_backward_places workspace = dhp_backward_places_of(args);
  dhp_bwd_params params = {
      .statistics = args->workspace,
      .pairs = (int32_t)dhp_delta_pairs(args),
      .heads = (int32_t)forward->q.size[1],
      .own_heads = (int32_t)owned[1],
      .heads_per_key_head = (int32_t)(forward->q.size[1] / forward->k.size[1]),
      .seqlen_q = (int32_t)forward->q.size[2],
      .seqlen_k = (int32_t)dhp_mask_keys_seen(&mask),
      .own_rows = (int32_t)owned[2],
      .own_tiles = (int32_t)((owned[2] + kernel->tile_q - 1) / kernel->tile_q),
      .head_dim = (int32_t)owned[3],
      .is_causal = forward->is_causal != 0,
      .causal_offset = (int32_t)mask.highest,
      .scale = (float)forward->scale,
      .scale_log2 = fmaxf((float)((double)(float)forward->scale * LOG2_E), FLT_MIN), /* as in the forward */
      .units = workspace.units,
      .sums = workspace.sums,
      .failed = workspace.failed,
      .spent = (uint32_t *)workspace.bounds,
      .blocks = (int32_t)dhp_dq_out_blocks(args),
      .zero = 0,
  };
  set_order(&params, owned[0] * owned[1]);
  set_output(owns_keys ? &args->dk : &args->dq, &params.from_ds, params.from_ds_stride);
  set_output(&args->dv, &params.from_p, params.from_p_stride);
  void *arguments[] = {&maps[OWN_S], &maps[OWN_DP], &maps[WALK_S], &maps[WALK_DP], &maps[STATISTICS], &params};
  /* A larger launch would be spread unevenly over multiprocessors that are still partly taken. */
  const int may_overlap = what->grid <= DHP_MULTIPROCESSORS;
  return dhp_session_launch(session, kernel, what->grid, arguments, may_overlap, stream, error);
}

dhp_status dhp_backward_launch(const dhp_backward *args, const dhp_backward_plan *plan, int device, void *stream,
                               dhp_error *error) {
  dhp_session session;
  dhp_status status = dhp_session_begin(&session, device, error);
  if (status != DHP_OK) return status;
  for (int i = 0; i < plan->count && status == DHP_OK; i++) {
    const dhp_launch *const what = &plan->launches[i];
    if (strcmp(what->kernel->part, "bounds") == 0)
      status = dhp_bounds_launch(&session, args, what->kernel, stream, error);
    else if (strcmp(what->kernel->part, "delta") == 0)
      status = dhp_delta_launch(&session, args, what->kernel, stream, error);
    else if (strcmp(what->kernel->part, "dq out") == 0)
      status = dhp_dq_out_launch(&session, args, what->kernel, stream, error);
    else
      status = launch(&session, args, what, stream, error);
  }
  dhp_session_end(&session);
  return status;
}
