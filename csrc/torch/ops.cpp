/*
 * ops.cpp - the operators of dhp, as torch's dispatcher calls them on real tensors: arguments come and results go on
 * its stack, and an exception carries the operator's name.
 *
 * Schemas, fake kernels, derivatives and the rules of autocast and vmap are in dhp_safe_fa/_ops.py and beside it.
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

Tensor tensor(const char *name, StableIValue value) { return given(name, value, "[B, H, S, D]"); }

/* Where queries stand, and what forms the scores take. */
Options options_from(const StableIValue *places, const StableIValue *forms) {
  return {values::to<bool>(places[0]),    values::to<std::optional<double>>(places[1]),
          values::to<int64_t>(places[2]), values::to<int64_t>(forms[0]),
          values::to<int64_t>(forms[1]),  values::to<std::optional<double>>(forms[2])};
}

Tensor forward_from(const StableIValue *stack, uint64_t arguments, Tensor *lse) {
  check_arguments(arguments, 10);
  return forward({tensor("q", stack[0]), tensor("k", stack[1]), tensor("v", stack[2]),
                  options_from(stack + 3, stack + 6), values::to<std::optional<Tensor>>(stack[9])},
                 lse);
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
    Gradients gradients{tensor("grad_out", stack[0]),
                        tensor("out", stack[4]),
                        given("lse", stack[5], "[B, H, S]"),
                        values::to<std::optional<Tensor>>(stack[9]),
                        {values::to<bool>(stack[10]), values::to<bool>(stack[11]), values::to<bool>(stack[12])}};
    const Call call{
        tensor("q", stack[1]), tensor("k", stack[2]), tensor("v", stack[3]), options_from(stack + 6, stack + 13), {}};
    Tensor results[3];
    backward(call, gradients, results);
    for (int i = 0; i < 3; i++)
      stack[i] = values::from(results[i]);
  });
}

void attention_varlen(StableIValue *stack, uint64_t arguments, uint64_t) {
  run_as("attention_varlen", [=] {
    check_arguments(arguments, 17);
    const char *const rows = "[tokens, H, D]", *const cached = "[tokens, H, D] or [pages, page_size, H, D]";
    const Options options{
        values::to<bool>(stack[7]),     values::to<std::optional<double>>(stack[8]), 0, values::to<int64_t>(stack[10]),
        values::to<int64_t>(stack[11]), values::to<std::optional<double>>(stack[12])};
    const Packed results =
        forward({given("q", stack[0], rows), given("k", stack[1], cached), given("v", stack[2], cached),
                 given("cu_seqlens_q", stack[3], "[sequences + 1]"), values::to<std::optional<Tensor>>(stack[4]),
                 values::to<int64_t>(stack[5]), values::to<int64_t>(stack[6]), options, values::to<bool>(stack[9]),
                 values::to<std::optional<Tensor>>(stack[13]), values::to<std::optional<Tensor>>(stack[14]),
                 values::to<std::optional<Tensor>>(stack[15]), values::to<std::optional<Tensor>>(stack[16])});
    stack[0] = values::from(results.out);
    stack[1] = values::from(results.lse);
  });
}

void implement(torch::stable::detail::StableLibrary &library) {
  library.impl("attention", &attention);
  library.impl("attention_lse", &attention_lse);
  library.impl("attention_backward", &attention_backward);
  library.impl("attention_varlen", &attention_varlen);
}

} // namespace
} // namespace dhp

STABLE_TORCH_LIBRARY_IMPL(dhp, CPU, m) { dhp::implement(m); }

STABLE_TORCH_LIBRARY_IMPL(dhp, CUDA, m) { dhp::implement(m); }
