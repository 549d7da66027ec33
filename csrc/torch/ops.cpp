/*
 * ops.cpp - the only file that knows torch. Turns torch tensors into the plain structs of dhp_fa.h: checks what the
 * structs cannot express (rank, device, torch dtype), allocates, finds the stream, turns a status into an exception.
 *
 * Written against LibTorch's stable ABI (2.10), so one build serves every torch from 2.10 on. Schemas, fake kernels and
 * autocast rules are in dhp_safe_fa/_ops.py.
 *
 *   dhp::attention, dhp::attention_lse     what users call: refuse gradients, then redispatch to
 *   dhp::_attention, dhp::_attention_lse   one kernel for CPU and CUDA tensors
 */
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../dhp_fa.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/* Lives in libtorch_cuda.so: absent, hence weak, where torch was built for CPUs only. */
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace {

[[noreturn]] void fail(const std::string &sentence) { throw std::runtime_error("dhp::attention: " + sentence); }

/* ---- torch tensor to dhp_tensor -------------------------------------------------------------------------------- */

dhp_dtype dtype_of(const char *name, const Tensor &t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DHP_FLOAT32;
    case ScalarType::Half: return DHP_FLOAT16;
    case ScalarType::BFloat16: return DHP_BFLOAT16;
    default: fail(std::string(name) + ": unsupported dtype; supported: float32 (CPU only), float16, bfloat16");
  }
}

dhp_tensor describe(const char *name, const Tensor &t) {
  if (t.dim() != 4)
    fail(std::string(name) + ": rank " + std::to_string(t.dim()) + "; expected 4 dimensions [B, H, S, D]");
  dhp_tensor d{};
  d.data = t.data_ptr();
  d.dtype = dtype_of(name, t);
  for (int i = 0; i < 4; i++) {
    d.size[i] = t.size(i);
    d.stride[i] = t.stride(i);
  }
  return d;
}

bool runs_in_place(const Tensor &t, const dhp_tensor &d) {
  return (d.size[3] <= 1 || d.stride[3] == 1) && (!t.is_cuda() || dhp_cuda_layout_supported(&d));
}

/* An input ready to be read; a copy in `keep` if its layout cannot be read in place. */
dhp_tensor readable(const char *name, const Tensor &t, std::optional<Tensor> &keep) {
  const dhp_tensor d = describe(name, t);
  if (runs_in_place(t, d)) return d;
  Tensor copy = torch::stable::new_empty(t, t.sizes());
  torch::stable::copy_(copy, t);
  keep = copy;
  return describe(name, copy);
}

/* ---- running --------------------------------------------------------------------------------------------------- */

/* dhp_executor over torch's own thread pool. */
struct Range {
  void (*body)(void *, int64_t, int64_t);
  void *context;
};

void run_range(int64_t first, int64_t last, void *context) {
  const Range *range = static_cast<const Range *>(context);
  range->body(range->context, first, last);
}

void run_on_torch_threads(void *, int64_t count, void (*body)(void *, int64_t, int64_t), void *context) {
  Range range{body, context};
  const int64_t grain = 1; /* one work item a thread is worth a thread: an item is a whole tile of queries */
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, grain, run_range, &range));
}

dhp_status run_cpu(const dhp_attention &args, dhp_error &error) {
  const dhp_executor executor{run_on_torch_threads, nullptr};
  return dhp_attention_cpu(&args, &executor, &error);
}

dhp_status run_cuda(const dhp_attention &args, int32_t device, dhp_error &error) {
  if (!aoti_torch_get_current_cuda_stream) fail("q: a CUDA tensor, but this torch was built without CUDA");
  void *stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return dhp_attention_cuda(&args, device, stream, &error);
}

void check_same_device(const char *name, const Tensor &t, const Tensor &q) {
  if (t.is_cuda() != q.is_cuda() || t.get_device_index() != q.get_device_index())
    fail(std::string(name) + ": on another device than q; q, k and v must be on the same device");
}

/* Everything that can be wrong is found before an output is allocated. */
Tensor forward(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal, std::optional<double> scale,
               int64_t causal_offset, Tensor *lse) {
  check_same_device("k", k, q);
  check_same_device("v", v, q);
  std::optional<Tensor> q_copy, k_copy, v_copy;
  dhp_attention args{};
  args.q = readable("q", q, q_copy);
  args.k = readable("k", k, k_copy);
  args.v = readable("v", v, v_copy);
  args.is_causal = is_causal;
  args.causal_offset = causal_offset;
  args.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(args.q.size[3])));

  Tensor out = torch::stable::empty_like(q);
  args.out = describe("out", out);
  std::optional<Tensor> out_copy;
  if (!runs_in_place(out, args.out)) {
    /* empty_like kept a permuted layout whose innermost dimension is not D */
    out_copy = torch::stable::new_empty(q, q.sizes());
    args.out = describe("out", *out_copy);
  }
  if (lse) {
    const int64_t sizes[] = {args.q.size[0], args.q.size[1], args.q.size[2]};
    *lse = torch::stable::new_empty(q, {sizes, 3}, ScalarType::Float);
    args.lse = static_cast<float *>(lse->data_ptr());
  }

  dhp_error error{};
  const dhp_status status = q.is_cuda() ? run_cuda(args, q.get_device_index(), error) : run_cpu(args, error);
  if (status != DHP_OK) fail(error.text);
  if (out_copy) torch::stable::copy_(out, *out_copy);
  return out;
}

/* ---- the operators --------------------------------------------------------------------------------------------- */

Tensor attention_kernel(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal, std::optional<double> scale,
                        int64_t causal_offset) {
  return forward(q, k, v, is_causal, scale, causal_offset, nullptr);
}

std::tuple<Tensor, Tensor> attention_lse_kernel(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal,
                                                std::optional<double> scale, int64_t causal_offset) {
  Tensor lse;
  Tensor out = forward(q, k, v, is_causal, scale, causal_offset, &lse);
  return {out, lse};
}

/*
 * The stable ABI cannot ask a tensor whether it requires grad. But a view of it, taken while gradients are recorded, is
 * a leaf exactly if it does not.
 */
bool requires_grad(const Tensor &t) {
  StableIValue stack[] = {torch::stable::detail::from(t)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::alias", "", stack, TORCH_ABI_VERSION));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_leaf", "", stack, TORCH_ABI_VERSION));
  return !torch::stable::detail::to<bool>(stack[0]);
}

/* Calls the private operator of the same arguments on the stack; its outputs take their place. */
void redispatch(const char *name, const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal,
                std::optional<double> scale, int64_t causal_offset, StableIValue (&stack)[6]) {
  if (aoti_torch_grad_mode_is_enabled() && (requires_grad(q) || requires_grad(k) || requires_grad(v)))
    fail("an input requires grad, and there is no backward yet: call it under torch.no_grad() or detach q, k and v");
  stack[0] = torch::stable::detail::from(q);
  stack[1] = torch::stable::detail::from(k);
  stack[2] = torch::stable::detail::from(v);
  stack[3] = torch::stable::detail::from(is_causal);
  stack[4] = torch::stable::detail::from(scale);
  stack[5] = torch::stable::detail::from(causal_offset);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
}

Tensor attention(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal, std::optional<double> scale,
                 int64_t causal_offset) {
  StableIValue stack[6];
  redispatch("dhp::_attention", q, k, v, is_causal, scale, causal_offset, stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

std::tuple<Tensor, Tensor> attention_lse(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal,
                                         std::optional<double> scale, int64_t causal_offset) {
  StableIValue stack[6];
  redispatch("dhp::_attention_lse", q, k, v, is_causal, scale, causal_offset, stack);
  Tensor out = torch::stable::detail::to<Tensor>(stack[0]);
  return {out, torch::stable::detail::to<Tensor>(stack[1])};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dhp, CompositeImplicitAutograd, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_lse", TORCH_BOX(&attention_lse));
}

STABLE_TORCH_LIBRARY_IMPL(dhp, CPU, m) {
  m.impl("_attention", TORCH_BOX(&attention_kernel));
  m.impl("_attention_lse", TORCH_BOX(&attention_lse_kernel));
}

STABLE_TORCH_LIBRARY_IMPL(dhp, CUDA, m) {
  m.impl("_attention", TORCH_BOX(&attention_kernel));
  m.impl("_attention_lse", TORCH_BOX(&attention_lse_kernel));
}
