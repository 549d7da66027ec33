/*
 * backward.c - the entry points of the gradients: check, run.
 *
 * Nothing here reads an element.
 */
#include "check.h"
#include "cpu/backward/backward_cpu.h"
#include "error.h"

dhp_status dhp_backward_check(const dhp_backward *args, int on_cuda, dhp_error *error) {
  const dhp_status status = dhp_check_gradients(args, error);
  return status == DHP_OK ? dhp_attention_check(&args->forward, on_cuda, error) : status;
}

dhp_status dhp_backward_cpu(const dhp_backward *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_status status = dhp_backward_check(args, 0, error);
  return status == DHP_OK ? dhp_cpu_backward(args, executor, error) : status;
}
