/* launch.c - delta's parameters and launch. */
#include "launch.h"

#include "../../hopper/chip.h"
#include "../../kernels/kernel_table.h"
#include "../../mask.h"
#include "../backward/workspace.h"
#include "../bounds/launch.h"
#include "../dq_out/launch.h"
#include "params.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_delta;

int64_t dhp_delta_pairs(const dhp_backward *args) { return (args->forward.q.size[2] + 1) / 2; }

static int64_t tiles(const dhp_backward *args, const dhp_kernel_info *kernel) {
  return (2 * dhp_delta_pairs(args) + kernel->rows - 1) / kernel->rows;
}

const dhp_kernel_info *dhp_delta_kernel(const dhp_backward *args) {
  const dhp_tensor *const q = &args->forward.q;
  return dhp_family_kernel(&dhp_family_delta, q->dtype, q->size[3], "delta");
}

int64_t dhp_delta_grid(const dhp_backward *args, const dhp_kernel_info *kernel) {
  const int64_t *const q = args->forward.q.size;
  return q[0] * q[1] * tiles(args, kernel);
}

/* What the kernel needs to make units of rows. */
static void set_units(const dhp_backward *args, dhp_delta_params *params) {
  const int64_t *const k = args->forward.k.size;
  const dhp_backward_places places = dhp_backward_places_of(args);
  params->bounds = places.bounds;
  params->failed = places.failed;
  params->sums = places.sums;
  params->heads_per_key_head = (int32_t)(args->forward.q.size[1] / k[1]);
  params->seqlen_k = (int32_t)k[2];
  params->causal_offset = (int32_t)dhp_mask_of(&args->forward).highest;
  params->key_tiles = (int32_t)dhp_bounds_tiles(args, dhp_bounds_kernel(args));
  params->blocks = (int32_t)dhp_dq_out_blocks(args);
  params->units = places.units;
}

dhp_status dhp_delta_launch(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                            void *stream, dhp_error *error) {
  const dhp_tensor *const out = &args->forward.out, *const grad_out = &args->grad_out;
  dhp_delta_params params = {
      .out = out->data,
      .grad_out = grad_out->data,
      .out_stride = {out->stride[0], out->stride[1], out->stride[2]},
      .grad_out_stride = {grad_out->stride[0], grad_out->stride[1], grad_out->stride[2]},
      .lse = args->forward.lse,
      .grad_lse = args->grad_lse ? args->grad_lse : args->forward.lse,
      .statistics = args->workspace,
      .heads = (int32_t)out->size[1],
      .seqlen_q = (int32_t)out->size[2],
      .head_dim = (int32_t)out->size[3],
      .pairs = (int32_t)dhp_delta_pairs(args),
      .tiles = (int32_t)tiles(args, kernel),
      .has_grad_lse = args->grad_lse ? ~0u : 0,
      /* without units: one key, the only one that is looked at */
      .bounds = out->data,
      .heads_per_key_head = 1,
      .seqlen_k = 1,
  };
  if (dhp_backward_is_one_pass(args)) set_units(args, &params);
  void *arguments[] = {&params};
  const int64_t grid = dhp_delta_grid(args, kernel);
  return dhp_session_launch(session, kernel, grid, arguments, grid <= DHP_MULTIPROCESSORS, stream, error);
}
