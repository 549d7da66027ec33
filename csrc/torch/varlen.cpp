/*
 * varlen.cpp - attention of packed torch tensors.
 */
#include <utility>
#include <vector>

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

/* The same, ready to be read; a copy in `keep` if rows are not contiguous. */
static dhp_tensor readable_as(Describe describe_it, const char *name, const Tensor &t, const dhp_tensor &d,
                              std::optional<Tensor> &keep) {
  if (d.size[3] <= 1 || d.stride[3] == 1) return d;
  keep = contiguous_copy(t);
  return describe_it(name, *keep);
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
  if (!t.is_contiguous()) keep = contiguous_copy(t);
  return static_cast<const int32_t *>((keep ? *keep : t).data_ptr());
}

/* Where sequences lie among the keys, one way or the other. */
static void set_keys(dhp_varlen &args, const VarlenCall &call, std::optional<Tensor> keep[4]) {
  const int64_t n = args.sequences;
  const std::string count = std::to_string(n), one_more = "[" + std::to_string(n + 1) + "]";
  if (call.cu_seqlens_k && call.page_table) fail("cu_seqlens_k: given beside page_table; supported: one of them");
  if (!call.cu_seqlens_k && !call.page_table)
    fail("cu_seqlens_k: None; expected a tensor [sequences + 1], or page_table in its place");
  if (call.page_table && !call.seqused_k) fail("seqused_k: None beside page_table; expected a tensor [sequences]");
  if (call.cu_seqlens_k)
    args.cu_seqlens_k = numbers_of("cu_seqlens_k", *call.cu_seqlens_k, {n + 1}, one_more, call.q, keep[0]);
  if (call.seqused_k)
    args.seqused_k = numbers_of("seqused_k", *call.seqused_k, {n}, "[" + count + "]", call.q, keep[1]);
  if (call.leftpad_k)
    args.leftpad_k = numbers_of("leftpad_k", *call.leftpad_k, {n}, "[" + count + "]", call.q, keep[3]);
  if (call.page_table) {
    const std::string shape = "[" + count + ", pages of a sequence]";
    args.page_table = numbers_of("page_table", *call.page_table, {n, -1}, shape, call.q, keep[2]);
    args.page_table_width = call.page_table->size(1);
  }
}

Packed forward(const VarlenCall &call) {
  const Tensor &q = call.q;
  check_same_device("k", call.k, q);
  check_same_device("v", call.v, q);
  dhp_varlen args{};
  dhp_attention &packed = args.packed;
  packed.q = describe_packed("q", q);
  const Describe describe_keys = call.page_table ? describe_pages : describe_packed;
  packed.k = describe_keys("k", call.k);
  packed.v = describe_keys("v", call.v);
  set_options(packed, call.options);
  std::optional<Tensor> q_copy, k_copy, v_copy, cu_seqlens_q_copy, key_copies[4], sinks_copy;
  if (call.cu_seqlens_q.dim() != 1 || call.cu_seqlens_q.size(0) < 1)
    fail("cu_seqlens_q: shape " + shape_of(call.cu_seqlens_q, call.cu_seqlens_q.dim()) + "; expected [sequences + 1]");
  args.sequences = call.cu_seqlens_q.size(0) - 1;
  args.cu_seqlens_q = numbers_of("cu_seqlens_q", call.cu_seqlens_q, {-1}, "", q, cu_seqlens_q_copy);
  set_keys(args, call, key_copies);
  args.max_seqlen_q = call.max_seqlen_q;
  args.max_seqlen_k = call.max_seqlen_k;
  args.is_bottom_right = call.is_bottom_right;

  if (call.sinks) packed.sinks = readable_sinks(*call.sinks, q, q.size(1), sinks_copy);

  packed.out = packed.q;
  packed.out.size[3] = packed.v.size[3];
  dhp_varlen usual = args; /* before any memory is spent: what is refused whatever the layout */
  usual.packed.q.stride[3] = usual.packed.k.stride[3] = usual.packed.v.stride[3] = usual.packed.out.stride[3] = 1;
  dhp_error error{};
  if (dhp_varlen_check(&usual, q.is_cuda(), &error) != DHP_OK) fail(error.text);

  packed.q = readable_as(describe_packed, "q", q, packed.q, q_copy);
  packed.k = readable_as(describe_keys, "k", call.k, packed.k, k_copy);
  packed.v = readable_as(describe_keys, "v", call.v, packed.v, v_copy);
  const int64_t lse_sizes[] = {q.size(1), q.size(0)};
  const int64_t out_sizes[] = {q.size(0), q.size(1), call.v.size(call.v.dim() - 1)};
  Packed results{torch::stable::new_empty(q, {out_sizes, 3}),
                 torch::stable::new_empty(q, {lse_sizes, 2}, row_dtype(q))};
  packed.out = describe_packed("out", results.out);
  packed.lse = results.lse.data_ptr();
  if (dhp_varlen_cpu(&args, &on_torch_threads, &error) != DHP_OK) fail(error.text);
  return results;
}

} // namespace dhp
