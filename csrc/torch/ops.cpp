/*
 * ops.cpp - the only file that knows torch. Turns torch tensors into the plain structs of dhp_fa.h: checks what the
 * structs cannot express (rank, device, torch dtype, gradients), allocates, finds the stream, turns a status into an
 * exception.
 *
 * Written against LibTorch's stable ABI (2.10), so one build serves every torch from 2.10 on. Schemas, fake kernels and
 * autocast rules are in dhp_safe_fa/_ops.py.
 */
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cctype>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "../dhp_fa.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/* Lives in libtorch_cuda.so: absent, hence weak, where torch was built for CPUs only. */
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace {

[[noreturn]] void fail(const std::string &sentence) { throw std::runtime_error("dhp::attention: " + sentence); }

/* torch's C functions report failure by a code, after printing the cause themselves. */
void check(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) fail("a call into torch failed; its cause stands above");
}

/* ---- torch tensor to dhp_tensor -------------------------------------------------------------------------------- */

/* As Python calls it. C++ has names of its own for the older dtypes; those of the later ones differ in their case. */
std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
  case ScalarType::Byte: return "uint8";
  case ScalarType::Char: return "int8";
  case ScalarType::Short: return "int16";
  case ScalarType::Int: return "int32";
  case ScalarType::Long: return "int64";
  case ScalarType::Double: return "float64";
  case ScalarType::ComplexHalf: return "complex32";
  case ScalarType::ComplexFloat: return "complex64";
  case ScalarType::ComplexDouble: return "complex128";
  default: break;
  }
  std::string name = torch::headeronly::toString(dtype);
  for (char &letter : name)
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return name;
}

dhp_dtype dtype_of(const char *name, const Tensor &t) {
  switch (t.scalar_type()) {
  case ScalarType::Float: return DHP_FLOAT32;
  case ScalarType::Half: return DHP_FLOAT16;
  case ScalarType::BFloat16: return DHP_BFLOAT16;
  default:
    fail(std::string(name) + ": dtype " + dtype_name(t.scalar_type()) +
         "; supported: float32 (CPU only), float16, bfloat16");
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

/* The same input ready to be read; a copy in `keep` if its layout cannot be read in place. */
dhp_tensor readable(const char *name, const Tensor &t, const dhp_tensor &d, std::optional<Tensor> &keep) {
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
  check(torch_parallel_for(0, count, grain, run_range, &range));
}

dhp_status run_cpu(const dhp_attention &args, dhp_error &error) {
  const dhp_executor executor{run_on_torch_threads, nullptr};
  return dhp_attention_cpu(&args, &executor, &error);
}

dhp_status run_cuda(const dhp_attention &args, int32_t device, dhp_error &error) {
  if (!aoti_torch_get_current_cuda_stream) fail("q: a CUDA tensor, but this torch was built without CUDA");
  void *stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &stream));
  return dhp_attention_cuda(&args, device, stream, &error);
}

void check_same_device(const char *name, const Tensor &t, const Tensor &q) {
  if (t.is_cuda() != q.is_cuda() || t.get_device_index() != q.get_device_index())
    fail(std::string(name) + ": on another device than q; q, k and v must be on the same device");
}

/* ---- gradients ------------------------------------------------------------------------------------------------- */
/*
 * The operators' autograd key falls through to these kernels, which refuse inputs that take part in differentiation.
 * The stable ABI cannot ask a tensor about that, but its views tell: while gradients are recorded, a view is a leaf
 * exactly if the tensor does not require grad.
 */

bool ask(const char *question, StableIValue tensor) {
  StableIValue stack[] = {tensor};
  check(torch_call_dispatcher(question, "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<bool>(stack[0]);
}

bool is_leaf(StableIValue view) { return ask("aten::is_leaf", view); }

/*
 * Does autograd see the operations of this kernel? Not below a __torch_dispatch__ mode, and not in inference mode,
 * where there is nothing to refuse. A tensor made in inference mode never takes part in autograd, so it is no probe for
 * later.
 */
bool autograd_is_listening() {
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  thread_local std::optional<Tensor> probe;
  if (!probe) {
    const int64_t sizes[] = {1};
    Tensor t = torch::stable::empty({sizes, 1}, ScalarType::Float);
    if (ask("aten::is_inference", torch::stable::detail::from(t))) return false;
    t.set_requires_grad(true);
    probe = t;
  }
  StableIValue stack[] = {torch::stable::detail::from(*probe)};
  check(torch_call_dispatcher("aten::alias", "", stack, TORCH_ABI_VERSION));
  return !is_leaf(stack[0]);
}

/* Unpacked as a dual number, the primal is such a view, and the tangent is there if forward mode follows the tensor. */
void refuse_gradients(const char *name, const Tensor &t) {
  const int64_t level = 0; /* torch has one level of forward-mode differentiation */
  StableIValue stack[] = {torch::stable::detail::from(t), torch::stable::detail::from(level)};
  check(torch_call_dispatcher("aten::_unpack_dual", "", stack, TORCH_ABI_VERSION));
  const bool has_tangent = torch::stable::detail::to<Tensor>(stack[1]).defined();
  if (!is_leaf(stack[0]) || has_tangent)
    fail(std::string(name) + " requires grad, and there is no backward yet: call it under torch.no_grad() or detach " +
         name);
}

/* As empty_like(q); for the usual layout, without its way through the dispatcher, which costs a small call a tenth. */
Tensor output_like(const Tensor &q, const dhp_tensor &d) {
  if (!q.is_contiguous()) return torch::stable::empty_like(q);
  int32_t dtype = 0, device_type = 0;
  check(aoti_torch_get_dtype(q.get(), &dtype));
  check(aoti_torch_get_device_type(q.get(), &device_type));
  AtenTensorHandle out = nullptr;
  check(aoti_torch_empty_strided(4, d.size, d.stride, dtype, device_type, q.get_device_index(), &out));
  return Tensor(out);
}

/* ---- one call -------------------------------------------------------------------------------------------------- */

/* What may follow q, k and v: the options of the schemas in dhp_safe_fa/_ops.py, in their order. */
struct Options {
  bool is_causal;
  std::optional<double> scale;
  int64_t causal_offset;
};

struct Call {
  Tensor q, k, v;
  Options options;
};

/* Python's None arrives as a tensor that is not defined. */
Tensor given(const char *name, StableIValue value) {
  Tensor t = torch::stable::detail::to<Tensor>(value);
  if (!t.defined()) fail(std::string(name) + ": None; expected a tensor [B, H, S, D]");
  return t;
}

Call call_from(const StableIValue *stack, uint64_t arguments) {
  using torch::stable::detail::to;
  if (arguments != 6) fail("the schema has " + std::to_string(arguments) + " arguments, the library was built for 6");
  const Options options{to<bool>(stack[3]), to<std::optional<double>>(stack[4]), to<int64_t>(stack[5])};
  return {given("q", stack[0]), given("k", stack[1]), given("v", stack[2]), options};
}

/* Before any memory is spent: what the C core would refuse whatever the layout. */
void refuse_unsupported(dhp_attention args, bool on_cuda) {
  args.q.stride[3] = args.k.stride[3] = args.v.stride[3] = 1; /* as they will be when they are read */
  args.out = args.q;
  dhp_error error{};
  if (dhp_attention_check(&args, on_cuda, &error) != DHP_OK) fail(error.text);
}

/* attention, and the lse where it is wanted. */
Tensor forward(const Call &call, Tensor *lse) {
  const Tensor &q = call.q, &k = call.k, &v = call.v;
  const Options &options = call.options;
  if (autograd_is_listening()) {
    refuse_gradients("q", q);
    refuse_gradients("k", k);
    refuse_gradients("v", v);
  }
  check_same_device("k", k, q);
  check_same_device("v", v, q);
  dhp_attention args{};
  args.q = describe("q", q);
  args.k = describe("k", k);
  args.v = describe("v", v);
  args.is_causal = options.is_causal;
  args.causal_offset = options.causal_offset;
  const double usual_scale = 1.0 / std::sqrt(static_cast<double>(args.q.size[3]));
  args.scale = static_cast<float>(options.scale.value_or(usual_scale));
  refuse_unsupported(args, q.is_cuda());

  Tensor out = output_like(q, args.q);
  std::optional<Tensor> q_copy, k_copy, v_copy, out_copy;
  args.q = readable("q", q, args.q, q_copy);
  args.k = readable("k", k, args.k, k_copy);
  args.v = readable("v", v, args.v, v_copy);
  args.out = describe("out", out);
  if (!runs_in_place(out, args.out)) {
    /* empty_like kept a permuted layout whose innermost dimension is not D */
    out_copy = torch::stable::new_empty(q, q.sizes());
    args.out = describe("out", *out_copy);
  }
  if (lse) {
    const int64_t sizes[] = {args.q.size[0], args.q.size[1], args.q.size[2]};
    *lse = torch::stable::new_empty(q, {sizes, 3}, ScalarType::Float);
    args.lse = lse->data_ptr();
  }

  dhp_error error{};
  const dhp_status status = q.is_cuda() ? run_cuda(args, q.get_device_index(), error) : run_cpu(args, error);
  if (status != DHP_OK) fail(error.text);
  if (out_copy) torch::stable::copy_(out, *out_copy);
  return out;
}

/* ---- the operators --------------------------------------------------------------------------------------------- */
/* Arguments come and results go on torch's stack, as TORCH_BOX would have it for functions that name each argument. */

void attention(StableIValue *stack, uint64_t arguments, uint64_t) {
  stack[0] = torch::stable::detail::from(forward(call_from(stack, arguments), nullptr));
}

void attention_lse(StableIValue *stack, uint64_t arguments, uint64_t) {
  Tensor lse;
  stack[0] = torch::stable::detail::from(forward(call_from(stack, arguments), &lse));
  stack[1] = torch::stable::detail::from(lse);
}

void implement(torch::stable::detail::StableLibrary &library) {
  library.impl("attention", &attention);
  library.impl("attention_lse", &attention_lse);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(dhp, CPU, m) { implement(m); }

STABLE_TORCH_LIBRARY_IMPL(dhp, CUDA, m) { implement(m); }
