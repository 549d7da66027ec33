/*
 * tensors.cpp - see tensors.h.
 */
#include "tensors.h"

#include <cctype>
#include <stdexcept>

namespace dhp {

void fail(const std::string &sentence) { throw std::runtime_error(sentence); }

void check(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) fail("a call into torch failed");
}

Tensor taken(StableIValue value) { return torch::stable::detail::to<Tensor>(value); }

void require(const char *name, const Tensor &t, const char *shape) {
  if (!t.defined()) fail(std::string(name) + ": None; expected a tensor " + shape);
}

static std::string text_of(const int64_t *sizes, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; i++)
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

/* torch's own words for why are not in its stable ABI. */
[[noreturn]] static void fail_to_allocate(const int64_t *sizes, size_t rank, ScalarType dtype) {
  fail("a tensor of shape " + text_of(sizes, rank) + ", " + dtype_name(dtype) + ", could not be allocated");
}

Tensor allocated(const Tensor &like, torch::headeronly::IntHeaderOnlyArrayRef sizes, std::optional<ScalarType> dtype) {
  try {
    return torch::stable::new_empty(like, sizes, dtype);
  } catch (const std::runtime_error &) {
    fail_to_allocate(sizes.data(), sizes.size(), dtype.value_or(like.scalar_type()));
  }
}

void *memory_of(const char *name, const Tensor &t) {
  if (t.numel() == 0) return t.data_ptr();
  int64_t bytes = 0, end = t.storage_offset() + 1; /* behind the last element, in elements */
  for (int64_t i = 0; i < t.dim(); i++)
    end += (t.size(i) - 1) * t.stride(i);
  check(aoti_torch_get_storage_size(t.get(), &bytes));
  if (end * static_cast<int64_t>(t.element_size()) > bytes)
    fail(std::string(name) + ": its memory ends before its last element; its storage has been freed, or made smaller");
  return t.data_ptr();
}

/* Those that this operator has code for; a call with tensors of others does not come here. */
static std::string device_of(const Tensor &t) {
  return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "cpu";
}

void check_same_device(const char *name, const Tensor &t, const Tensor &q, const char *model) {
  if (t.is_cuda() != q.is_cuda() || t.get_device_index() != q.get_device_index())
    fail(std::string(name) + ": on " + device_of(t) + ", " + model + " on " + device_of(q) +
         "; all tensors must be on the same device");
}

/* ---- what a tensor is -------------------------------------------------------------------------------------------- */

/* C++ has names of its own for the older dtypes; those of the later ones differ in their case. */
std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
  case ScalarType::Byte: return "uint8";
  case ScalarType::Char: return "int8";
  case ScalarType::Short: return "int16";
  case ScalarType::Int: return "int32";
  case ScalarType::Long: return "int64";
  case ScalarType::Half: return "float16";
  case ScalarType::Float: return "float32";
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
  case ScalarType::Double: return DHP_FLOAT64;
  default:
    fail(std::string(name) + ": dtype " + dtype_name(t.scalar_type()) +
         "; supported: float16, bfloat16, and on the CPU float32 and float64");
  }
}

std::string shape_of(const Tensor &t, int64_t rank) { return text_of(t.sizes().data(), static_cast<size_t>(rank)); }

dhp_tensor describe(const char *name, const Tensor &t) {
  if (t.dim() != 4)
    fail(std::string(name) + ": rank " + std::to_string(t.dim()) + "; expected 4 dimensions [B, H, S, D]");
  dhp_tensor d{};
  d.data = memory_of(name, t);
  d.dtype = dtype_of(name, t);
  for (int i = 0; i < 4; i++) {
    d.size[i] = t.size(i);
    d.stride[i] = t.stride(i);
  }
  return d;
}

/* ---- inputs ------------------------------------------------------------------------------------------------------ */

Tensor contiguous_copy(const Tensor &t) {
  Tensor copy = allocated(t, t.sizes());
  torch::stable::copy_(copy, t);
  return copy;
}

static bool runs_in_place(const Tensor &t, const dhp_tensor &d) {
  return (d.size[3] <= 1 || d.stride[3] == 1) && (!t.is_cuda() || dhp_cuda_layout_supported(&d));
}

dhp_tensor readable(const char *name, const Tensor &t, const dhp_tensor &d, std::optional<Tensor> &keep) {
  if (runs_in_place(t, d)) return d;
  keep = contiguous_copy(t);
  return describe(name, *keep);
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* As empty_like; for the usual layout, without its way through the dispatcher, which costs a small call a tenth. */
static Tensor empty_like(const Tensor &like, const dhp_tensor &d) {
  if (!like.is_contiguous()) {
    try {
      return torch::stable::empty_like(like);
    } catch (const std::runtime_error &) {
      fail_to_allocate(d.size, 4, like.scalar_type());
    }
  }
  int32_t dtype = 0, device_type = 0;
  check(aoti_torch_get_dtype(like.get(), &dtype));
  check(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle out = nullptr;
  if (aoti_torch_empty_strided(4, d.size, d.stride, dtype, device_type, like.get_device_index(), &out) !=
      AOTI_TORCH_SUCCESS)
    fail_to_allocate(d.size, 4, like.scalar_type());
  return Tensor(out);
}

static Tensor empty_with(const Tensor &like, int64_t head_dim) {
  const int64_t sizes[] = {like.size(0), like.size(1), like.size(2), head_dim};
  return allocated(like, {sizes, 4});
}

Output::Output(const char *name, const Tensor &like, const dhp_tensor &d, int64_t head_dim)
    : result_(head_dim == d.size[3] ? empty_like(like, d) : empty_with(like, head_dim)) {
  target_ = describe(name, result_);
  if (runs_in_place(result_, target_)) return;
  /* empty_like kept a permuted layout whose innermost dimension is not D */
  copy_ = allocated(like, like.sizes());
  target_ = describe(name, *copy_);
}

Tensor Output::finish() const {
  Tensor result = result_;
  if (copy_) torch::stable::copy_(result, *copy_);
  return result;
}

/* ---- one number a query row -------------------------------------------------------------------------------------- */

ScalarType row_dtype(const Tensor &q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor new_rows(const Tensor &q) {
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2)};
  return allocated(q, {sizes, 3}, row_dtype(q));
}

const void *readable_rows(const char *name, const Tensor &t, const std::vector<int64_t> &sizes, const Tensor &q,
                          std::optional<Tensor> &keep) {
  std::string expected;
  bool agrees = t.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; i < sizes.size(); i++) {
    agrees = agrees && t.size(static_cast<int64_t>(i)) == sizes[i];
    expected += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  if (!agrees)
    fail(std::string(name) + ": shape " + shape_of(t, t.dim()) + "; expected [" + expected +
         "], one number for each query row");
  if (t.scalar_type() != row_dtype(q))
    fail(std::string(name) + ": dtype " + dtype_name(t.scalar_type()) + "; expected " + dtype_name(row_dtype(q)));
  static const double no_row = 0; /* an address also where there is none: to the core, NULL is a missing tensor */
  if (t.numel() == 0) return &no_row;
  const void *const there = memory_of(name, t);
  if (t.is_contiguous()) return there;
  keep = contiguous_copy(t);
  return keep->data_ptr();
}

Tensor not_needed(const Tensor &q) {
  const int64_t none[] = {0};
  return allocated(q, {none, 1});
}

} // namespace dhp
