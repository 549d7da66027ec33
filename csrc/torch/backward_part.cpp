/*
 * backward_part.cpp - the launches of a backward one by one (../families/backward/part.h), as operators:
 *
 *     _backward_workspace(q, k) -> (workspace, statistics, failed, sums, units, bounds, columns)
 *     _backward_part(part, workspace, q, k, v, out, lse, grad_out, grad_lse, dq, dk, dv, ...) -> ()
 *
 * The first one allocates, and says where places begin, in bytes. What a part does not read or write need only have
 * the right shape. dq, dk and dv have to lie so that the kernels can write them. Schemas: in
 * dhp_safe_fa/integrations/context_parallel/parts.py.
 */
#include <torch/csrc/stable/library.h>

#include <utility>

#include "../families/backward/part.h"
#include "calls.h"
#include "running.h"

namespace values = torch::stable::detail;

namespace dhp {
namespace {

/* Shapes alone: q stands for out, grad_out and dq, k for v, dk and dv; no pointer is followed. */
dhp_backward of_shapes(const Tensor &q, const Tensor &k) {
  dhp_backward args{};
  args.forward = described({q, k, k, {}, {}});
  args.forward.out = args.grad_out = args.dq = args.forward.q;
  args.dk = args.dv = args.forward.k;
  return args;
}

void workspace(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor q = taken(stack[0]), k = taken(stack[1]);
  require("q", q, "[B, H, S, D]");
  require("k", k, "[B, H, S, D]");
  dhp_backward args = of_shapes(q, k);
  const int64_t sizes[] = {static_cast<int64_t>(dhp_backward_workspace(&args, 1))};
  const Tensor bytes = allocated(q, {sizes, 1}, ScalarType::Byte);
  args.workspace = bytes.data_ptr();
  dhp_backward_offsets at{};
  dhp_error error{};
  if (dhp_backward_offsets_of(&args, &at, &error) != DHP_OK) fail(error.text);
  stack[0] = values::from(bytes);
  const int64_t offsets[] = {at.statistics, at.failed, at.sums, at.units, at.bounds, at.columns};
  for (int i = 0; i < 6; i++)
    stack[1 + i] = values::from(offsets[i]);
}

dhp_tensor wanted(const char *name, const std::optional<Tensor> &t, dhp_tensor like) {
  if (t) return describe(name, *t);
  like.data = nullptr;
  return like;
}

void part(StableIValue *stack, uint64_t, uint64_t) {
  const auto optional = [stack](int i) { return values::to<std::optional<Tensor>>(stack[i]); };
  const int64_t which = values::to<int64_t>(stack[0]);
  const Tensor workspace = taken(stack[1]), q = taken(stack[2]), k = taken(stack[3]), v = taken(stack[4]);
  const Tensor out = taken(stack[5]), lse = taken(stack[6]), grad_out = taken(stack[7]), dq = taken(stack[9]);
  const std::optional<Tensor> grad_lse = optional(8), dk = optional(10), dv = optional(11);
  const Options options{values::to<bool>(stack[12]),
                        values::to<std::optional<double>>(stack[13]),
                        values::to<int64_t>(stack[14]),
                        -1,
                        -1,
                        {}};
  require("workspace", workspace, "[bytes]");
  require("lse", lse, "[B, H, S]");
  const std::pair<const char *, const Tensor &> like_q[] = {
      {"q", q}, {"k", k}, {"v", v}, {"out", out}, {"grad_out", grad_out}, {"dq", dq}};
  for (const auto &[name, t] : like_q)
    require(name, t, "[B, H, S, D]");
  if (which < 0 || which >= DHP_PARTS)
    fail("part: " + std::to_string(which) + "; there are " + std::to_string(DHP_PARTS));
  const auto part = static_cast<dhp_backward_part>(which);
  const unsigned touched = dhp_backward_part_touches(part);
  dhp_backward args{};
  dhp_attention &forward = args.forward;
  forward = described({q, k, v, options, {}});
  forward.out = describe("out", out);
  args.grad_out = describe("grad_out", grad_out);
  args.dq = describe("dq", dq);
  args.dk = wanted("dk", dk, forward.k);
  args.dv = wanted("dv", dv, forward.v);
  check_same_device("workspace", workspace, q);
  check_same_device("out", out, q);
  check_same_device("lse", lse, q);
  check_same_device("grad_out", grad_out, q);
  check_same_device("dq", dq, q);
  if (grad_lse) check_same_device("grad_lse", *grad_lse, q);
  if (dk) check_same_device("dk", *dk, q);
  if (dv) check_same_device("dv", *dv, q);

  std::optional<Tensor> copies[7];
  if (touched & DHP_OF_Q) forward.q = readable("q", q, forward.q, copies[0]);
  if (touched & DHP_OF_K) forward.k = readable("k", k, forward.k, copies[1]);
  if (touched & DHP_OF_V) forward.v = readable("v", v, forward.v, copies[2]);
  if (touched & DHP_OF_OUT) forward.out = readable("out", out, forward.out, copies[3]);
  if (touched & DHP_OF_GRAD_OUT) args.grad_out = readable("grad_out", grad_out, args.grad_out, copies[4]);
  forward.lse = memory_of("lse", lse);
  if (part == DHP_PART_DELTA) {
    const std::vector<int64_t> rows{q.size(0), q.size(1), q.size(2)};
    forward.lse = const_cast<void *>(readable_rows("lse", lse, rows, q, copies[5])); /* here it is read alone */
    if (grad_lse) args.grad_lse = readable_rows("grad_lse", *grad_lse, rows, q, copies[6]);
  }
  args.workspace = memory_of("workspace", workspace);
  if (workspace.scalar_type() != ScalarType::Byte || !workspace.is_contiguous() ||
      static_cast<size_t>(workspace.numel()) < dhp_backward_workspace(&args, 1))
    fail("workspace: not what _backward_workspace gives for a call of this shape");
  dhp_error error{};
  if (dhp_backward_part_cuda(&args, part, q.get_device_index(), current_stream(q), &error) != DHP_OK) fail(error.text);
}

} // namespace
} // namespace dhp

STABLE_TORCH_LIBRARY_IMPL(dhp, CUDA, m) {
  m.impl("_backward_workspace", &dhp::workspace);
  m.impl("_backward_part", &dhp::part);
}
