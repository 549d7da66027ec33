/*
 * tensors.h - torch tensors as the plain tensors of dhp_fa.h: what the structs cannot express (rank, device, torch
 * dtype) is checked, what cannot be read in place is copied, outputs are allocated.
 *
 * Everything in this folder is written against LibTorch's stable ABI (2.10), so one build serves every torch from 2.10
 * on.
 */
#ifndef DHP_TORCH_TENSORS_H
#define DHP_TORCH_TENSORS_H

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "../dhp_fa.h"

namespace dhp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/* Throws std::runtime_error; the operator puts its name in front (ops.cpp). */
[[noreturn]] void fail(const std::string &sentence);

/* torch's C functions report failure by a code. */
void check(AOTITorchError code);

/* A tensor from the dispatcher's stack. Whoever takes one owns it: all of a call are taken before any is refused, or
 * those that stand behind it would never be freed. */
Tensor taken(StableIValue value);
/* Python's None arrives as a tensor that is not defined. `shape` says what was expected, in words. */
void require(const char *name, const Tensor &t, const char *shape);

/* A tensor of these sizes, and of this dtype if one is given, beside another one; or refused in a sentence. */
Tensor allocated(const Tensor &like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                 std::optional<ScalarType> dtype = std::nullopt);

/* Where its elements are; refused if its storage holds fewer, as one does that was freed. */
void *memory_of(const char *name, const Tensor &t);

/* On q's device, or refused; `model`: what q is called. */
void check_same_device(const char *name, const Tensor &t, const Tensor &q, const char *model = "q");

/* As Python calls it. */
std::string dtype_name(ScalarType dtype);
/* One that the core knows, or refused. */
dhp_dtype dtype_of(const char *name, const Tensor &t);
/* [size, ...] of the first `rank` dimensions. */
std::string shape_of(const Tensor &t, int64_t rank);
Tensor contiguous_copy(const Tensor &t);

dhp_tensor describe(const char *name, const Tensor &t);

/* The same input ready to be read; a copy in `keep` if its layout cannot be read in place. */
dhp_tensor readable(const char *name, const Tensor &t, const dhp_tensor &d, std::optional<Tensor> &keep);

/*
 * An output that lies as empty_like(like), or contiguous if its head_dim is another one. Where the kernels cannot write
 * such a layout, they write a contiguous tensor, and finish() copies it over.
 */
class Output {
public:
  /* `like` as described by `d`. */
  Output(const char *name, const Tensor &like, const dhp_tensor &d, int64_t head_dim);
  const dhp_tensor &target() const { return target_; }
  Tensor finish() const;

private:
  Tensor result_;
  std::optional<Tensor> copy_;
  dhp_tensor target_;
};

/* One number a query row, as lse is: float64 where q is, else float32. */
ScalarType row_dtype(const Tensor &q);
/* [B, Hq, Sq] of that dtype, contiguous. */
Tensor new_rows(const Tensor &q);
/* The data of a tensor of these sizes and that dtype of q's rows; a copy in `keep` if it is not contiguous. */
const void *readable_rows(const char *name, const Tensor &t, const std::vector<int64_t> &sizes, const Tensor &q,
                          std::optional<Tensor> &keep);
/* What stands for a gradient that is not needed: of size [0]. */
Tensor not_needed(const Tensor &q);

} // namespace dhp

#endif
