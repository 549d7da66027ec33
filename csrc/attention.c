/*
 * attention.c - the entry points of the C ABI: check, plan, run.
 *
 * Nothing here reads an element of q, k or v.
 */
#include "check.h"
#include "cpu/attention_cpu.h"
#include "cuda/layout.h"
#include "error.h"
#include "families/decode/launch.h"
#include "families/fold/parts.h"
#include "families/forward/launch.h"

static int is_empty(const dhp_tensor *t) { return t->size[0] == 0 || t->size[1] == 0 || t->size[2] == 0; }

dhp_status dhp_attention_check(const dhp_attention *args, int on_cuda, dhp_error *error) {
  if (on_cuda) {
    dhp_plan plan;
    return dhp_plan_attention(args, &plan, error);
  }
  const dhp_status status = dhp_check_arguments(args, error);
  return status == DHP_OK ? dhp_check_cpu_head_dims(args, error) : status;
}

dhp_status dhp_attention_cpu(const dhp_attention *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_status status = dhp_attention_check(args, 0, error);
  if (status != DHP_OK || is_empty(&args->out)) return status;
  return dhp_cpu_forward(args, executor, error);
}

dhp_status dhp_attention_cuda(const dhp_attention *args, int device, void *stream, dhp_error *error) {
  dhp_plan plan;
  dhp_status status = dhp_plan_attention(args, &plan, error);
  if (status != DHP_OK || !plan.kernel) return status;

  const char *const names[] = {"q", "k", "v", "out"};
  const dhp_tensor *const tensors[] = {&args->q, &args->k, &args->v, &args->out};
  status = dhp_cuda_check_layouts(names, tensors, sizeof tensors / sizeof *tensors, error);
  if (status != DHP_OK) return status;
  if (plan.parts > 0 && !args->workspace)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "workspace: NULL; expected %zu bytes, as dhp_attention_workspace says",
                    dhp_parts_bytes(plan.parts, plan.kernel->head_dim));
  if (dhp_decode_is_planned(&plan)) return dhp_decode_launch(args, &plan, device, stream, error);
  return dhp_forward_launch(args, &plan, device, stream, error);
}

size_t dhp_attention_workspace(const dhp_attention *args, int on_cuda) {
  dhp_plan plan;
  dhp_error ignored;
  if (!on_cuda || dhp_plan_attention(args, &plan, &ignored) != DHP_OK) return 0;
  return plan.kernel ? dhp_parts_bytes(plan.parts, plan.kernel->head_dim) : 0;
}
