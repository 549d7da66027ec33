/*
 * sinks.cpp - the gradient of sinks of torch tensors.
 */
#include "calls.h"
#include "running.h"

namespace dhp {

Tensor sinks_backward(const SinksCall &call) {
  const Tensor &out = call.out;
  check_same_device("grad_out", call.grad_out, out, "out");
  check_same_device("lse", call.lse, out, "out");
  check_same_device("sinks", call.sinks, out, "out");
  if (call.grad_lse) check_same_device("grad_lse", *call.grad_lse, out, "out");
  dhp_sinks_backward args{};
  args.out = describe("out", out);
  args.grad_out = describe("grad_out", call.grad_out);
  std::optional<Tensor> out_copy, lse_copy, sinks_copy, grad_out_copy, grad_lse_copy;
  const std::vector<int64_t> rows{out.size(0), out.size(1), out.size(2)}, heads{out.size(1)};
  args.lse = readable_rows("lse", call.lse, rows, out, lse_copy);
  if (call.grad_lse) args.grad_lse = readable_rows("grad_lse", *call.grad_lse, rows, out, grad_lse_copy);
  args.sinks = readable_sinks(call.sinks, out, out.size(1), sinks_copy);

  dhp_sinks_backward usual = args; /* before any memory is spent: what is refused whatever the layout */
  usual.out.stride[3] = usual.grad_out.stride[3] = 1;
  dhp_error error{};
  if (dhp_sinks_backward_check(&usual, out.is_cuda(), &error) != DHP_OK) fail(error.text);

  args.out = readable("out", out, args.out, out_copy);
  args.grad_out = readable("grad_out", call.grad_out, args.grad_out, grad_out_copy);
  Tensor dsinks = allocated(out, {heads.data(), 1}, row_dtype(out));
  args.dsinks = dsinks.data_ptr();
  if (dhp_sinks_backward_cpu(&args, &on_torch_threads, &error) != DHP_OK) fail(error.text);
  return dsinks;
}

} // namespace dhp
