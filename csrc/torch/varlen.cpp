/*
 * varlen.cpp - attention of packed torch tensors, and its gradients.
 */
#include "packed.h"
#include "running.h"

namespace dhp {

Packed forward(const VarlenCall &call) {
  const Tensor &q = call.q;
  PackedCall described(call);
  dhp_varlen args = described.args();
  dhp_attention &packed = args.packed;

  std::optional<Tensor> sinks_copy;
  if (call.sinks) packed.sinks = readable_sinks(*call.sinks, q, q.size(1), sinks_copy);
  dhp_varlen usual = args; /* before any memory is spent: what is refused whatever the layout */
  usual.packed.q.stride[3] = usual.packed.k.stride[3] = usual.packed.v.stride[3] = usual.packed.out.stride[3] = 1;
  dhp_error error{};
  if (dhp_varlen_check(&usual, q.is_cuda(), &error) != DHP_OK) fail(error.text);

  described.make_readable(packed);
  const int64_t lse_sizes[] = {q.size(1), q.size(0)};
  const int64_t out_sizes[] = {q.size(0), q.size(1), call.v.size(call.v.dim() - 1)};
  Packed results{allocated(q, {out_sizes, 3}), allocated(q, {lse_sizes, 2}, row_dtype(q))};
  packed.out = describe_packed("out", results.out);
  packed.lse = results.lse.data_ptr();
  std::optional<Tensor> workspace;
  if (const size_t bytes = dhp_varlen_workspace(&args, q.is_cuda())) {
    const int64_t sizes[] = {static_cast<int64_t>(bytes)};
    workspace = allocated(q, {sizes, 1}, ScalarType::Byte);
    args.workspace = workspace->data_ptr();
  }
  const dhp_status status = q.is_cuda() ? dhp_varlen_cuda(&args, q.get_device_index(), current_stream(q), &error)
                                        : dhp_varlen_cpu(&args, &on_torch_threads, &error);
  if (status != DHP_OK) fail(error.text);
  return results;
}

/* dq, dk or dv: contiguous, in the shape of q, k or v, unless it is not needed. */
static dhp_tensor gradient_of(const char *name, bool need, const Tensor &t, Tensor &result) {
  result = need ? allocated(t, t.sizes()) : not_needed(t);
  if (need) return describe_packed(name, result);
  return {};
}

void backward(const VarlenCall &call, const Gradients &gradients, Tensor results[3]) {
  const Tensor &q = call.q;
  PackedCall described(call);
  dhp_varlen_backward args{};
  args.forward = described.args();
  dhp_attention &packed = args.forward.packed;
  check_same_device("grad_out", gradients.grad_out, q);
  check_same_device("out", gradients.out, q);
  check_same_device("lse", gradients.lse, q);
  if (gradients.grad_lse) check_same_device("grad_lse", *gradients.grad_lse, q);
  args.grad_out = describe_packed("grad_out", gradients.grad_out);
  packed.out = describe_packed("out", gradients.out);
  std::optional<Tensor> out_copy, lse_copy, grad_out_copy, grad_lse_copy;
  const std::vector<int64_t> rows{q.size(1), q.size(0)};
  packed.lse = const_cast<void *>(readable_rows("lse", gradients.lse, rows, q, lse_copy)); /* here it is read alone */
  if (gradients.grad_lse) args.grad_lse = readable_rows("grad_lse", *gradients.grad_lse, rows, q, grad_lse_copy);

  dhp_varlen_backward usual = args; /* as in forward */
  dhp_attention &usual_packed = usual.forward.packed;
  for (dhp_tensor *t : {&usual_packed.q, &usual_packed.k, &usual_packed.v, &usual_packed.out, &usual.grad_out})
    t->stride[3] = 1;
  dhp_error error{};
  if (dhp_varlen_backward_check(&usual, q.is_cuda(), &error) != DHP_OK) fail(error.text);

  args.dq = gradient_of("dq", gradients.need[0], q, results[0]);
  args.dk = gradient_of("dk", gradients.need[1], call.k, results[1]);
  args.dv = gradient_of("dv", gradients.need[2], call.v, results[2]);
  described.make_readable(packed);
  packed.out = readable_packed("out", gradients.out, packed.out, out_copy);
  args.grad_out = readable_packed("grad_out", gradients.grad_out, args.grad_out, grad_out_copy);
  if (dhp_varlen_backward_cpu(&args, &on_torch_threads, &error) != DHP_OK) fail(error.text);
}

} // namespace dhp
