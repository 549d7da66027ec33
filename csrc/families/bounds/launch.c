/* launch.c - the parameters and launch of bounds. */
#include "launch.h"

#include "../../hopper/chip.h"
#include "../../kernels/kernel_table.h"
#include "../backward/workspace.h"
#include "params.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_bounds;

const dhp_kernel_info *dhp_bounds_kernel(const dhp_backward *args) {
  const dhp_tensor *const k = &args->forward.k;
  return dhp_family_kernel(&dhp_family_bounds, k->dtype, k->size[3], "bounds");
}

int64_t dhp_bounds_tiles(const dhp_backward *args, const dhp_kernel_info *kernel) {
  return (args->forward.k.size[2] + kernel->rows - 1) / kernel->rows;
}

int64_t dhp_bounds_grid(const dhp_backward *args, const dhp_kernel_info *kernel) {
  const int64_t *const k = args->forward.k.size;
  return k[0] * k[1] * dhp_bounds_tiles(args, kernel);
}

dhp_status dhp_bounds_launch(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                             void *stream, dhp_error *error) {
  const dhp_tensor *const k = &args->forward.k, *const v = &args->forward.v;
  const dhp_backward_places places = dhp_backward_places_of(args);
  dhp_bounds_params params = {
      .k = k->data,
      .v = v->data,
      .k_stride = {k->stride[0], k->stride[1], k->stride[2]},
      .v_stride = {v->stride[0], v->stride[1], v->stride[2]},
      .bounds = places.bounds,
      .columns = places.columns,
      .heads = (int32_t)k->size[1],
      .seqlen_k = (int32_t)k->size[2],
      .head_dim = (int32_t)k->size[3],
      .tiles = (int32_t)dhp_bounds_tiles(args, kernel),
  };
  void *arguments[] = {&params};
  const int64_t grid = dhp_bounds_grid(args, kernel);
  return dhp_session_launch(session, kernel, grid, arguments, grid <= DHP_MULTIPROCESSORS, stream, error);
}
