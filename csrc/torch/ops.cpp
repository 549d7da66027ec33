/*
 * ops.cpp - the operators of dhp, as torch's dispatcher calls them on real tensors: arguments come and results go on
 * its stack, and an exception carries the operator's name.
 *
 * Schemas, fake kernels, derivatives and the rules of autocast and vmap are in dhp_safe_fa/_operator and beside it.
 */
#include <torch/csrc/stable/library.h>

#include <stdexcept>

#include "calls.h"

namespace values = torch::stable::detail;

namespace dhp {
namespace {

template <typename Body> void run_as(const char *name, Body body) {
  try {
    body();
  } catch (const std::runtime_error &error) {
    throw std::runtime_error(std::string("dhp::") + name + ": " + error.what());
  }
}

void check_arguments(uint64_t arguments, uint64_t built_for) {
  if (arguments != built_for)
    fail("the schema has " + std::to_string(arguments) + " arguments, the library was built for " +
         std::to_string(built_for));
}

void require_call(const Call &call) {
  require("q", call.q, "[B, H, S, D]");
  require("k", call.k, "[B, H, S, D]");
  require("v", call.v, "[B, H, S, D]");
}

/* The first of the options, and the later ones, which do not follow them in a backward. */
Options options_from(const StableIValue *first, const StableIValue *later) {
  return {values::to<bool>(first[0]),    values::to<std::optional<double>>(first[1]),
          values::to<int64_t>(first[2]), values::to<int64_t>(later[0]),
          values::to<int64_t>(later[1]), values::to<std::optional<double>>(later[2])};
}

Tensor forward_from(const StableIValue *stack, uint64_t arguments, Tensor *lse) {
  check_arguments(arguments, 10);
  const Call call{taken(stack[0]), taken(stack[1]), taken(stack[2]), options_from(stack + 3, stack + 6),
                  values::to<std::optional<Tensor>>(stack[9])};
  require_call(call);
  return forward(call, lse);
}

void attention(StableIValue *stack, uint64_t arguments, uint64_t) {
  run_as("attention", [=] { stack[0] = values::from(forward_from(stack, arguments, nullptr)); });
}

void attention_lse(StableIValue *stack, uint64_t arguments, uint64_t) {
  /* the family's name: either operator refuses in the same words */
  run_as("attention", [=] {
    Tensor lse;
    stack[0] = values::from(forward_from(stack, arguments, &lse));
    stack[1] = values::from(lse);
  });
}

void attention_backward(StableIValue *stack, uint64_t arguments, uint64_t) {
  run_as("attention_backward", [=] {
    check_arguments(arguments, 16);
    Gradients gradients{taken(stack[0]),
                        taken(stack[4]),
                        taken(stack[5]),
                        values::to<std::optional<Tensor>>(stack[9]),
                        {values::to<bool>(stack[10]), values::to<bool>(stack[11]), values::to<bool>(stack[12])}};
    const Call call{taken(stack[1]), taken(stack[2]), taken(stack[3]), options_from(stack + 6, stack + 13), {}};
    require("grad_out", gradients.grad_out, "[B, H, S, D]");
    require("out", gradients.out, "[B, H, S, D]");
    require("lse", gradients.lse, "[B, H, S]");
    require_call(call);
    Tensor results[3];
    backward(call, gradients, results);
    for (int i = 0; i < 3; i++)
      stack[i] = values::from(results[i]);
  });
}

void attention_sinks_backward(StableIValue *stack, uint64_t arguments, uint64_t) {
  run_as("attention_sinks_backward", [=] {
    check_arguments(arguments, 5);
    const SinksCall call{taken(stack[0]), taken(stack[1]), taken(stack[2]), taken(stack[3]),
                         values::to<std::optional<Tensor>>(stack[4])};
    require("grad_out", call.grad_out, "[B, H, S, D]");
    require("out", call.out, "[B, H, S, D]");
    require("lse", call.lse, "[B, H, S]");
    require("sinks", call.sinks, "[H]");
    stack[0] = values::from(sinks_backward(call));
  });
}

const char *const packed_rows = "[tokens, H, D]";

/* q, k and v, and what follows the tensors. */
VarlenCall varlen_call_from(const StableIValue *qkv, const StableIValue *stack) {
  const Options options{
      values::to<bool>(stack[4]),    values::to<std::optional<double>>(stack[5]), 0, values::to<int64_t>(stack[7]),
      values::to<int64_t>(stack[8]), values::to<std::optional<double>>(stack[9])};
  return {taken(qkv[0]),
          taken(qkv[1]),
          taken(qkv[2]),
          taken(stack[0]),
          values::to<std::optional<Tensor>>(stack[1]),
          values::to<int64_t>(stack[2]),
          values::to<int64_t>(stack[3]),
          options,
          values::to<bool>(stack[6]),
          values::to<std::optional<Tensor>>(stack[10]),
          values::to<std::optional<Tensor>>(stack[11]),
          values::to<std::optional<Tensor>>(stack[12]),
          {}};
}

void require_call(const VarlenCall &call) {
  const char *const cached = "[tokens, H, D] or [pages, page_size, H, D]";
  require("q", call.q, packed_rows);
  require("k", call.k, cached);
  require("v", call.v, cached);
  require("cu_seqlens_q", call.cu_seqlens_q, "[sequences + 1]");
}

void attention_varlen(StableIValue *stack, uint64_t arguments, uint64_t) {
  run_as("attention_varlen", [=] {
    check_arguments(arguments, 17);
    VarlenCall call = varlen_call_from(stack, stack + 3);
    call.sinks = values::to<std::optional<Tensor>>(stack[16]);
    require_call(call);
    const Packed results = forward(call);
    stack[0] = values::from(results.out);
    stack[1] = values::from(results.lse);
  });
}

void attention_varlen_backward(StableIValue *stack, uint64_t arguments, uint64_t) {
  run_as("attention_varlen_backward", [=] {
    check_arguments(arguments, 23);
    Gradients gradients{taken(stack[0]),
                        taken(stack[4]),
                        taken(stack[5]),
                        values::to<std::optional<Tensor>>(stack[19]),
                        {values::to<bool>(stack[20]), values::to<bool>(stack[21]), values::to<bool>(stack[22])}};
    const VarlenCall call = varlen_call_from(stack + 1, stack + 6);
    require("grad_out", gradients.grad_out, packed_rows);
    require("out", gradients.out, packed_rows);
    require("lse", gradients.lse, "[H, tokens]");
    require_call(call);
    Tensor results[3];
    backward(call, gradients, results);
    for (int i = 0; i < 3; i++)
      stack[i] = values::from(results[i]);
  });
}

void implement(torch::stable::detail::StableLibrary &library) {
  library.impl("attention", &attention);
  library.impl("attention_lse", &attention_lse);
  library.impl("attention_backward", &attention_backward);
  library.impl("attention_sinks_backward", &attention_sinks_backward);
  library.impl("attention_varlen", &attention_varlen);
  library.impl("attention_varlen_backward", &attention_varlen_backward);
}

} // namespace
} // namespace dhp

STABLE_TORCH_LIBRARY_IMPL(dhp, CPU, m) { dhp::implement(m); }

STABLE_TORCH_LIBRARY_IMPL(dhp, CUDA, m) { dhp::implement(m); }
