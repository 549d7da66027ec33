/*
 * varlen.cpp - attention of packed torch tensors.
 */
#include <cmath>

#include "calls.h"
#include "running.h"

namespace dhp {

/* [S, H, D] as [1, H, S, D]. */
static dhp_tensor describe_packed(const char *name, const Tensor &t) {
  if (t.dim() != 3)
    fail(std::string(name) + ": rank " + std::to_string(t.dim()) + "; expected 3 dimensions [tokens, H, D]");
  dhp_tensor d{};
  d.data = t.data_ptr();
  d.dtype = dtype_of(name, t);
  const int64_t sizes[] = {1, t.size(1), t.size(0), t.size(2)};
  const int64_t strides[] = {t.numel(), t.stride(1), t.stride(0), t.stride(2)};
  for (int i = 0; i < 4; i++) {
    d.size[i] = sizes[i];
    d.stride[i] = strides[i];
  }
  return d;
}

/* The same, ready to be read; a copy in `keep` if rows are not contiguous. */
static dhp_tensor readable_packed(const char *name, const Tensor &t, const dhp_tensor &d, std::optional<Tensor> &keep) {
  if (d.size[3] <= 1 || d.stride[3] == 1) return d;
  keep = contiguous_copy(t);
  return describe_packed(name, *keep);
}

/* `count` int32 on q's device; a copy in `keep` if they are not contiguous. */
static const int32_t *lengths_of(const char *name, const Tensor &t, int64_t count, const Tensor &q,
                                 std::optional<Tensor> &keep) {
  check_same_device(name, t, q);
  if (t.dim() != 1 || t.size(0) != count)
    fail(std::string(name) + ": shape " + shape_of(t, t.dim()) + "; expected [" + std::to_string(count) + "]");
  if (t.scalar_type() != ScalarType::Int)
    fail(std::string(name) + ": dtype " + dtype_name(t.scalar_type()) + "; expected int32");
  if (t.is_contiguous()) return static_cast<const int32_t *>(t.data_ptr());
  keep = contiguous_copy(t);
  return static_cast<const int32_t *>(keep->data_ptr());
}

Packed forward(const VarlenCall &call) {
  const Tensor &q = call.q;
  check_same_device("k", call.k, q);
  check_same_device("v", call.v, q);
  dhp_varlen args{};
  dhp_attention &packed = args.packed;
  packed.q = packed.out = describe_packed("q", q);
  packed.k = describe_packed("k", call.k);
  packed.v = describe_packed("v", call.v);
  set_options(packed, call.options);
  std::optional<Tensor> q_copy, k_copy, v_copy, cu_q_copy, cu_k_copy, used_copy;
  if (call.cu_seqlens_q.dim() != 1 || call.cu_seqlens_q.size(0) < 1)
    fail("cu_seqlens_q: shape " + shape_of(call.cu_seqlens_q, call.cu_seqlens_q.dim()) + "; expected [sequences + 1]");
  args.sequences = call.cu_seqlens_q.size(0) - 1;
  args.cu_seqlens_q = lengths_of("cu_seqlens_q", call.cu_seqlens_q, args.sequences + 1, q, cu_q_copy);
  args.cu_seqlens_k = lengths_of("cu_seqlens_k", call.cu_seqlens_k, args.sequences + 1, q, cu_k_copy);
  if (call.seqused_k) args.seqused_k = lengths_of("seqused_k", *call.seqused_k, args.sequences, q, used_copy);
  args.max_seqlen_q = call.max_seqlen_q;
  args.max_seqlen_k = call.max_seqlen_k;
  args.is_bottom_right = call.is_bottom_right;

  dhp_varlen usual = args; /* before any memory is spent: what is refused whatever the layout */
  usual.packed.q.stride[3] = usual.packed.k.stride[3] = usual.packed.v.stride[3] = usual.packed.out.stride[3] = 1;
  dhp_error error{};
  if (dhp_varlen_check(&usual, q.is_cuda(), &error) != DHP_OK) fail(error.text);

  packed.q = readable_packed("q", q, packed.q, q_copy);
  packed.k = readable_packed("k", call.k, packed.k, k_copy);
  packed.v = readable_packed("v", call.v, packed.v, v_copy);
  const int64_t lse_sizes[] = {q.size(1), q.size(0)};
  Packed results{torch::stable::new_empty(q, q.sizes()), torch::stable::new_empty(q, {lse_sizes, 2}, row_dtype(q))};
  packed.out = describe_packed("out", results.out);
  packed.lse = results.lse.data_ptr();
  if (dhp_varlen_cpu(&args, &on_torch_threads, &error) != DHP_OK) fail(error.text);
  return results;
}

} // namespace dhp
