/*
 * backward.cpp - the gradients of attention of torch tensors.
 */
#include "calls.h"
#include "running.h"

namespace dhp {

/* Before any memory is spent: what the C core would refuse whatever the layout. */
static void refuse_unsupported(dhp_backward args, bool on_cuda) {
  dhp_attention &forward = args.forward;
  for (dhp_tensor *t : {&forward.q, &forward.k, &forward.v, &forward.out, &args.grad_out})
    t->stride[3] = 1; /* as they will be when they are read */
  dhp_error error{};
  if (dhp_backward_check(&args, on_cuda, &error) != DHP_OK) fail(error.text);
}

/* dq, dk or dv: an output like q, k or v, unless it is not needed. */
static dhp_tensor gradient_of(const char *name, bool need, const Tensor &t, const dhp_tensor &d,
                              std::optional<Output> &output) {
  dhp_tensor target = d;
  target.data = nullptr;
  if (!need) return target;
  output.emplace(name, t, d, d.size[3]);
  return output->target();
}

static Tensor finished(const std::optional<Output> &output, const Tensor &q) {
  return output ? output->finish() : not_needed(q);
}

void backward(const Call &call, const Gradients &gradients, Tensor results[3]) {
  const Tensor &q = call.q;
  dhp_backward args{};
  dhp_attention &forward = args.forward;
  forward = described(call);
  check_same_device("grad_out", gradients.grad_out, q);
  check_same_device("out", gradients.out, q);
  check_same_device("lse", gradients.lse, q);
  if (gradients.grad_lse) check_same_device("grad_lse", *gradients.grad_lse, q);
  args.grad_out = describe("grad_out", gradients.grad_out);
  forward.out = describe("out", gradients.out);
  std::optional<Tensor> q_copy, k_copy, v_copy, out_copy, lse_copy, grad_out_copy, grad_lse_copy;
  const std::vector<int64_t> rows{q.size(0), q.size(1), q.size(2)};
  forward.lse = const_cast<void *>(readable_rows("lse", gradients.lse, rows, q, lse_copy)); /* here it is read alone */
  if (gradients.grad_lse) args.grad_lse = readable_rows("grad_lse", *gradients.grad_lse, rows, q, grad_lse_copy);
  refuse_unsupported(args, q.is_cuda());

  std::optional<Output> dq, dk, dv;
  args.dq = gradient_of("dq", gradients.need[0], q, forward.q, dq);
  args.dk = gradient_of("dk", gradients.need[1], call.k, forward.k, dk);
  args.dv = gradient_of("dv", gradients.need[2], call.v, forward.v, dv);
  forward.q = readable("q", q, forward.q, q_copy);
  forward.k = readable("k", call.k, forward.k, k_copy);
  forward.v = readable("v", call.v, forward.v, v_copy);
  forward.out = readable("out", gradients.out, forward.out, out_copy);
  args.grad_out = readable("grad_out", gradients.grad_out, args.grad_out, grad_out_copy);

  std::optional<Tensor> workspace;
  if (const size_t bytes = dhp_backward_workspace(&args, q.is_cuda())) {
    const int64_t sizes[] = {static_cast<int64_t>(bytes)};
    workspace = allocated(q, {sizes, 1}, ScalarType::Byte);
    args.workspace = workspace->data_ptr();
  }
  dhp_error error{};
  const dhp_status status = q.is_cuda() ? dhp_backward_cuda(&args, q.get_device_index(), current_stream(q), &error)
                                        : dhp_backward_cpu(&args, &on_torch_threads, &error);
  if (status != DHP_OK) fail(error.text);
  results[0] = finished(dq, q);
  results[1] = finished(dk, q);
  results[2] = finished(dv, q);
}

} // namespace dhp
