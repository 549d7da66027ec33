/*
 * packed.cpp - see packed.h.
 */
#include "packed.h"

#include <utility>

namespace dhp {

dhp_tensor describe_packed(const char *name, const Tensor &t) {
  if (t.dim() != 3)
    fail(std::string(name) + ": rank " + std::to_string(t.dim()) + "; expected 3 dimensions [tokens, H, D]");
  dhp_tensor d{};
  d.data = memory_of(name, t);
  d.dtype = dtype_of(name, t);
  const int64_t sizes[] = {1, t.size(1), t.size(0), t.size(2)};
  const int64_t strides[] = {t.numel(), t.stride(1), t.stride(0), t.stride(2)};
  for (int i = 0; i < 4; i++) {
    d.size[i] = sizes[i];
    d.stride[i] = strides[i];
  }
  return d;
}

/* [pages, page_size, H, D] as [pages, H, page_size, D]. */
static dhp_tensor describe_pages(const char *name, const Tensor &t) {
  if (t.dim() != 4)
    fail(std::string(name) + ": rank " + std::to_string(t.dim()) +
         "; expected 4 dimensions [pages, page_size, H, D], because of page_table");
  dhp_tensor d = describe(name, t);
  std::swap(d.size[1], d.size[2]);
  std::swap(d.stride[1], d.stride[2]);
  return d;
}

using Describe = dhp_tensor (*)(const char *name, const Tensor &t);

static dhp_tensor readable_as(Describe describe_it, const char *name, const Tensor &t, const dhp_tensor &d,
                              std::optional<Tensor> &keep) {
  if (t.is_cuda() ? dhp_cuda_layout_supported(&d) != 0 : d.size[3] <= 1 || d.stride[3] == 1) return d;
  keep = contiguous_copy(t);
  return describe_it(name, *keep);
}

dhp_tensor readable_packed(const char *name, const Tensor &t, const dhp_tensor &d, std::optional<Tensor> &keep) {
  return readable_as(describe_packed, name, t, d, keep);
}

/* int32 of this shape (-1: any) on q's device; a copy in `keep` if they are not contiguous. */
static const int32_t *numbers_of(const char *name, const Tensor &t, std::vector<int64_t> sizes,
                                 const std::string &shape, const Tensor &q, std::optional<Tensor> &keep) {
  check_same_device(name, t, q);
  bool agrees = t.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; agrees && i < sizes.size(); i++)
    agrees = sizes[i] == -1 || t.size(static_cast<int64_t>(i)) == sizes[i];
  if (!agrees) fail(std::string(name) + ": shape " + shape_of(t, t.dim()) + "; expected " + shape);
  if (t.scalar_type() != ScalarType::Int)
    fail(std::string(name) + ": dtype " + dtype_name(t.scalar_type()) + "; expected int32");
  static const int32_t no_number = 0; /* an address also where there is none: to the core, NULL is a missing tensor */
  if (t.numel() == 0) return &no_number;
  const void *const there = memory_of(name, t);
  if (!t.is_contiguous()) keep = contiguous_copy(t);
  return static_cast<const int32_t *>(keep ? keep->data_ptr() : there);
}

/* Where sequences lie among the keys, one way or the other. */
void PackedCall::set_keys() {
  const int64_t n = args_.sequences;
  const std::string count = std::to_string(n), one_more = "[" + std::to_string(n + 1) + "]";
  if (call_.cu_seqlens_k && call_.page_table) fail("cu_seqlens_k: given beside page_table; supported: one of them");
  if (!call_.cu_seqlens_k && !call_.page_table)
    fail("cu_seqlens_k: None; expected a tensor [sequences + 1], or page_table in its place");
  if (call_.page_table && !call_.seqused_k) fail("seqused_k: None beside page_table; expected a tensor [sequences]");
  if (call_.cu_seqlens_k)
    args_.cu_seqlens_k = numbers_of("cu_seqlens_k", *call_.cu_seqlens_k, {n + 1}, one_more, call_.q, cu_seqlens_k_);
  if (call_.seqused_k)
    args_.seqused_k = numbers_of("seqused_k", *call_.seqused_k, {n}, "[" + count + "]", call_.q, seqused_k_);
  if (call_.leftpad_k)
    args_.leftpad_k = numbers_of("leftpad_k", *call_.leftpad_k, {n}, "[" + count + "]", call_.q, leftpad_k_);
  if (call_.page_table) {
    const std::string shape = "[" + count + ", pages of a sequence]";
    args_.page_table = numbers_of("page_table", *call_.page_table, {n, -1}, shape, call_.q, page_table_);
    args_.page_table_width = call_.page_table->size(1);
  }
}

static Describe describe_keys(const VarlenCall &call) { return call.page_table ? describe_pages : describe_packed; }

PackedCall::PackedCall(const VarlenCall &call) : call_(call) {
  const Tensor &q = call.q, &cu_seqlens_q = call.cu_seqlens_q;
  check_same_device("k", call.k, q);
  check_same_device("v", call.v, q);
  dhp_attention &packed = args_.packed;
  packed.q = packed.out = describe_packed("q", q);
  packed.k = describe_keys(call)("k", call.k);
  packed.v = describe_keys(call)("v", call.v);
  packed.out.size[3] = packed.v.size[3];
  set_options(packed, call.options);
  if (cu_seqlens_q.dim() != 1 || cu_seqlens_q.size(0) < 1)
    fail("cu_seqlens_q: shape " + shape_of(cu_seqlens_q, cu_seqlens_q.dim()) + "; expected [sequences + 1]");
  args_.sequences = cu_seqlens_q.size(0) - 1;
  args_.cu_seqlens_q = numbers_of("cu_seqlens_q", cu_seqlens_q, {-1}, "", q, cu_seqlens_q_);
  set_keys();
  args_.max_seqlen_q = call.max_seqlen_q;
  args_.max_seqlen_k = call.max_seqlen_k;
  args_.is_bottom_right = call.is_bottom_right;
}

void PackedCall::make_readable(dhp_attention &packed) {
  packed.q = readable_packed("q", call_.q, packed.q, q_);
  packed.k = readable_as(describe_keys(call_), "k", call_.k, packed.k, k_);
  packed.v = readable_as(describe_keys(call_), "v", call_.v, packed.v, v_);
}

} // namespace dhp
