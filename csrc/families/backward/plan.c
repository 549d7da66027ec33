/*
 * plan.c - public shape and wanted gradients to launches.
 *
 * For a part and a head_dim there is one kernel: which gradients are wanted changes no bit of any, except that dk and
 * dv come from one kernel or from two, which order their sums alike.
 */
#include <limits.h>
#include <string.h>

#include "../../check.h"
#include "../../error.h"
#include "../../kernels/kernel_table.h"
#include "../bounds/launch.h"
#include "../delta/launch.h"
#include "../dq_out/launch.h"
#include "workspace.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_backward;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Adds the kernel of this part; 0 if there is none. */
static int add(dhp_backward_plan *plan, const dhp_backward *args, const char *part) {
  const dhp_tensor *const q = &args->forward.q, *const own = strcmp(part, "dq") ? &args->forward.k : q;
  const dhp_kernel_info *const kernel = dhp_family_kernel(&dhp_family_backward, q->dtype, q->size[3], part);
  if (!kernel) return 0;
  const int64_t grid = own->size[0] * own->size[1] * ceil_div(own->size[2], kernel->tile_q);
  if (grid > 0) plan->launches[plan->count++] = (dhp_launch){kernel, grid};
  return 1;
}

dhp_status dhp_plan_backward(const dhp_backward *args, dhp_backward_plan *plan, dhp_error *error) {
  *plan = (dhp_backward_plan){0};
  dhp_status status = dhp_check_gradients(args, error);
  if (status != DHP_OK) return status;
  if (args->forward.is_windowed)
    return dhp_fail(error, DHP_UNSUPPORTED, "window: (%lld, %lld) of a gradient; supported on CUDA: none, (-1, -1)",
                    (long long)args->forward.window_left, (long long)args->forward.window_right);
  status = dhp_check_cuda_call(&args->forward, error);
  const int64_t *const q = args->forward.q.size;
  if (status == DHP_OK && q[0] > 0 && q[1] > 0 && q[2] > 0) status = dhp_check_cuda_heads(&args->forward, error);
  if (status != DHP_OK) return status;

  const int one_pass = dhp_backward_is_one_pass(args);
  if (one_pass) {
    const dhp_kernel_info *const bounds = dhp_bounds_kernel(args);
    plan->launches[plan->count++] = (dhp_launch){bounds, dhp_bounds_grid(args, bounds)};
  }
  const dhp_kernel_info *const delta = dhp_delta_kernel(args);
  const int64_t delta_grid = delta ? dhp_delta_grid(args, delta) : 0;
  if (delta_grid > 0) plan->launches[plan->count++] = (dhp_launch){delta, delta_grid};
  const int dk = args->dk.data != NULL, dv = args->dv.data != NULL, dq = args->dq.data != NULL;
  int found = delta != NULL;
  if (one_pass) {
    found &= add(plan, args, "dq dk dv");
    const dhp_kernel_info *const dq_out = dhp_dq_out_kernel(args);
    plan->launches[plan->count++] = (dhp_launch){dq_out, dhp_dq_out_grid(args, dq_out)};
  } else {
    if ((dk || dv) && !add(plan, args, "dk dv"))
      found &= (!dv || add(plan, args, "dv")) && (!dk || add(plan, args, "dk"));
    if (dq) found &= add(plan, args, "dq");
  }
  if (!found)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: head_dim %lld; no backward kernel of this build serves it",
                    (long long)args->forward.q.size[3]);
  for (int i = 0; i < plan->count; i++)
    if (plan->launches[i].grid > INT_MAX)
      return dhp_fail(error, DHP_UNSUPPORTED,
                      "q, k: %lld tiles of rows over all heads of the batch; supported on CUDA: up to %d",
                      (long long)plan->launches[i].grid, INT_MAX);
  return DHP_OK;
}

size_t dhp_backward_workspace(const dhp_backward *args, int on_cuda) {
  return on_cuda ? dhp_backward_places_of(args).bytes : 0;
}
