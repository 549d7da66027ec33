/*
 * backward.c - the entry points of the gradients: check, plan, run.
 *
 * Nothing here reads an element.
 */
#include <string.h>

#include "check.h"
#include "cpu/backward/backward_cpu.h"
#include "cuda/layout.h"
#include "error.h"
#include "families/backward/launch.h"
#include "families/backward/part.h"

dhp_status dhp_backward_check(const dhp_backward *args, int on_cuda, dhp_error *error) {
  if (on_cuda) {
    dhp_backward_plan plan;
    return dhp_plan_backward(args, &plan, error);
  }
  const dhp_status status = dhp_check_gradients(args, error);
  return status == DHP_OK ? dhp_check_cpu_head_dims(&args->forward, error) : status;
}

dhp_status dhp_backward_cpu(const dhp_backward *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_status status = dhp_backward_check(args, 0, error);
  return status == DHP_OK ? dhp_cpu_backward(args, executor, error) : status;
}

dhp_status dhp_sinks_backward_check(const dhp_sinks_backward *args, int on_cuda, dhp_error *error) {
  return dhp_check_sinks_gradient(args, on_cuda, error);
}

dhp_status dhp_sinks_backward_cpu(const dhp_sinks_backward *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_status status = dhp_sinks_backward_check(args, 0, error);
  return status == DHP_OK ? dhp_cpu_sinks_backward(args, executor, error) : status;
}

/* The tensors of a call, in the order of the bits of dhp_backward_tensor. */
enum { TENSORS = 8 };
static void tensors_of(dhp_backward *args, dhp_tensor *tensors[TENSORS]) {
  dhp_attention *const forward = &args->forward;
  dhp_tensor *const all[TENSORS] = {&forward->q,     &forward->k, &forward->v, &forward->out,
                                    &args->grad_out, &args->dq,   &args->dk,   &args->dv};
  memcpy(tensors, all, sizeof all);
}

/* Of those that the call, or a part of it, touches. */
static dhp_status check_layouts(dhp_backward args, unsigned touched, dhp_error *error) {
  const char *const names[TENSORS] = {"q", "k", "v", "out", "grad_out", "dq", "dk", "dv"};
  dhp_tensor *tensors[TENSORS];
  tensors_of(&args, tensors);
  const dhp_tensor *checked[TENSORS];
  for (int i = 0; i < TENSORS; i++) {
    const int is_wanted = !((DHP_OF_DQ | DHP_OF_DK | DHP_OF_DV) >> i & 1) || tensors[i]->data;
    checked[i] = (touched >> i & 1) && is_wanted ? tensors[i] : NULL;
  }
  return dhp_cuda_check_layouts(names, checked, TENSORS, error);
}

dhp_status dhp_backward_cuda(const dhp_backward *args, int device, void *stream, dhp_error *error) {
  dhp_backward_plan plan;
  dhp_status status = dhp_plan_backward(args, &plan, error);
  if (status == DHP_OK && plan.count > 0) status = check_layouts(*args, ~0u, error);
  if (status != DHP_OK || plan.count == 0) return status;
  return dhp_backward_launch(args, &plan, device, stream, error);
}

unsigned dhp_backward_part_touches(dhp_backward_part part) {
  static const unsigned touched[] = {
      [DHP_PART_BOUNDS] = DHP_OF_K | DHP_OF_V,
      [DHP_PART_DELTA] = DHP_OF_OUT | DHP_OF_GRAD_OUT,
      [DHP_PART_SHARES] = DHP_OF_Q | DHP_OF_K | DHP_OF_V | DHP_OF_GRAD_OUT | DHP_OF_DK | DHP_OF_DV,
      [DHP_PART_DQ] = DHP_OF_DQ,
  };
  return part < DHP_PARTS ? touched[part] : 0;
}

dhp_status dhp_backward_part_cuda(const dhp_backward *args, dhp_backward_part part, int device, void *stream,
                                  dhp_error *error) {
  static const char *const names[] = {[DHP_PART_BOUNDS] = "bounds",
                                      [DHP_PART_DELTA] = "delta",
                                      [DHP_PART_SHARES] = "dq dk dv",
                                      [DHP_PART_DQ] = "dq out"};
  if (part >= DHP_PARTS) return dhp_fail(error, DHP_INVALID_ARGUMENT, "part: %d; there are %d", (int)part, DHP_PARTS);
  const unsigned touched = dhp_backward_part_touches(part);
  dhp_backward call = *args;
  dhp_tensor *tensors[TENSORS];
  tensors_of(&call, tensors);
  for (int i = 0; i < TENSORS; i++)
    if (!(touched >> i & 1)) tensors[i]->stride[3] = 1; /* of these shapes alone matter */
  dhp_backward_plan plan, one = {0};
  dhp_status status = dhp_plan_backward(&call, &plan, error);
  if (status == DHP_OK) status = check_layouts(call, touched, error);
  if (status != DHP_OK) return status;
  for (int i = 0; i < plan.count; i++)
    if (strcmp(plan.launches[i].kernel->part, names[part]) == 0) one.launches[one.count++] = plan.launches[i];
  if (one.count == 0)
    return dhp_fail(error, DHP_UNSUPPORTED, "part: %s; this call is not computed in one pass", names[part]);
  return dhp_backward_launch(&call, &one, device, stream, error);
}
