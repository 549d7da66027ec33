/*
 * backward.c - the entry points of the gradients: check, plan, run.
 *
 * Nothing here reads an element.
 */
#include "check.h"
#include "cpu/backward/backward_cpu.h"
#include "cuda/layout.h"
#include "families/backward/launch.h"

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

dhp_status dhp_backward_cuda(const dhp_backward *args, int device, void *stream, dhp_error *error) {
  dhp_backward_plan plan;
  dhp_status status = dhp_plan_backward(args, &plan, error);
  if (status != DHP_OK || plan.count == 0) return status;

  const dhp_attention *const forward = &args->forward;
  const char *const names[] = {"q", "k", "v", "out", "grad_out", "dq", "dk", "dv"};
  const dhp_tensor *const dq = args->dq.data ? &args->dq : NULL, *const dk = args->dk.data ? &args->dk : NULL;
  const dhp_tensor *const dv = args->dv.data ? &args->dv : NULL;
  const dhp_tensor *const tensors[] = {&forward->q,     &forward->k, &forward->v, &forward->out,
                                       &args->grad_out, dq,          dk,          dv};
  status = dhp_cuda_check_layouts(names, tensors, sizeof tensors / sizeof *tensors, error);
  if (status != DHP_OK) return status;
  return dhp_backward_launch(args, &plan, device, stream, error);
}
