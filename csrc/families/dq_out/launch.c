/* launch.c - dq_out's parameters and launch. */
#include "launch.h"

#include "../../hopper/chip.h"
#include "../../hopper/dq_format.h"
#include "../../kernels/kernel_table.h"
#include "../../mask.h"
#include "../backward/workspace.h"
#include "../bounds/launch.h"
#include "params.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_dq_out;

int64_t dhp_dq_out_blocks(const dhp_backward *args) {
  return (args->forward.q.size[2] + DQ_BLOCK_ROWS - 1) / DQ_BLOCK_ROWS;
}

int64_t dhp_dq_out_integers(const dhp_backward *args, const dhp_kernel_info *kernel) {
  const int64_t *const q = args->forward.q.size;
  return q[0] * q[1] * dhp_dq_out_blocks(args) * DQ_BLOCK_ROWS * kernel->head_dim;
}

static int64_t tiles(const dhp_backward *args, const dhp_kernel_info *kernel) {
  return (args->forward.q.size[2] + kernel->rows - 1) / kernel->rows;
}

const dhp_kernel_info *dhp_dq_out_kernel(const dhp_backward *args) {
  const dhp_tensor *const q = &args->forward.q;
  return dhp_family_kernel(&dhp_family_dq_out, q->dtype, q->size[3], "dq out");
}

int64_t dhp_dq_out_grid(const dhp_backward *args, const dhp_kernel_info *kernel) {
  const int64_t *const q = args->forward.q.size;
  return q[0] * q[1] * tiles(args, kernel);
}

dhp_status dhp_dq_out_launch(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                             void *stream, dhp_error *error) {
  const dhp_tensor *const dq = &args->dq;
  const dhp_backward_places places = dhp_backward_places_of(args);
  dhp_dq_out_params params = {
      .sums = places.sums,
      .units = places.units,
      .failed = places.failed,
      .columns = places.columns,
      .dq = dq->data,
      .dq_stride = {dq->stride[0], dq->stride[1], dq->stride[2]},
      .heads = (int32_t)dq->size[1],
      .heads_per_key_head = (int32_t)(dq->size[1] / args->forward.k.size[1]),
      .seqlen_q = (int32_t)dq->size[2],
      .head_dim = (int32_t)dq->size[3],
      .blocks = (int32_t)dhp_dq_out_blocks(args),
      .tiles = (int32_t)tiles(args, kernel),
      .seqlen_k = (int32_t)args->forward.k.size[2],
      .causal_offset = (int32_t)dhp_mask_of(&args->forward).highest,
      .key_tiles = (int32_t)dhp_bounds_tiles(args, dhp_bounds_kernel(args)),
      .scale = (float)args->forward.scale,
  };
  void *arguments[] = {&params};
  const int64_t grid = dhp_dq_out_grid(args, kernel);
  return dhp_session_launch(session, kernel, grid, arguments, grid <= DHP_MULTIPROCESSORS, stream, error);
}
