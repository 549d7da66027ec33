/*
 * forward.cpp - attention of torch tensors.
 */
#include <cmath>

#include "calls.h"
#include "running.h"

namespace dhp {

void set_options(dhp_attention &args, const Options &options) {
  args.is_causal = options.is_causal;
  args.causal_offset = options.causal_offset;
  args.is_windowed = options.window_left != -1 || options.window_right != -1;
  args.window_left = options.window_left;
  args.window_right = options.window_right;
  const double usual_scale = 1.0 / std::sqrt(static_cast<double>(args.q.size[3]));
  args.scale = options.scale.value_or(usual_scale);
  args.softcap = options.softcap.value_or(0.0);
}

const void *readable_sinks(const Tensor &sinks, const Tensor &q, int64_t heads, std::optional<Tensor> &keep) {
  check_same_device("sinks", sinks, q);
  if (sinks.dim() != 1 || sinks.size(0) != heads)
    fail("sinks: shape " + shape_of(sinks, sinks.dim()) + "; expected [" + std::to_string(heads) +
         "], one number for each query head");
  if (sinks.scalar_type() != row_dtype(q))
    fail("sinks: dtype " + dtype_name(sinks.scalar_type()) + "; expected " + dtype_name(row_dtype(q)));
  const void *const there = memory_of("sinks", sinks);
  if (!sinks.is_contiguous()) keep = contiguous_copy(sinks);
  return keep ? keep->data_ptr() : there;
}

dhp_attention described(const Call &call) {
  const Tensor &q = call.q;
  check_same_device("k", call.k, q);
  check_same_device("v", call.v, q);
  dhp_attention args{};
  args.q = describe("q", q);
  args.k = describe("k", call.k);
  args.v = describe("v", call.v);
  set_options(args, call.options);
  return args;
}

/* Before any memory is spent: what the C core would refuse whatever the layout. */
static void refuse_unsupported(dhp_attention args, bool on_cuda) {
  args.q.stride[3] = args.k.stride[3] = args.v.stride[3] = 1; /* as they will be when they are read */
  args.out = args.q;
  args.out.size[3] = args.v.size[3];
  dhp_error error{};
  if (dhp_attention_check(&args, on_cuda, &error) != DHP_OK) fail(error.text);
}

Tensor forward(const Call &call, Tensor *lse) {
  const Tensor &q = call.q;
  dhp_attention args = described(call);
  std::optional<Tensor> q_copy, k_copy, v_copy, sinks_copy;
  if (call.sinks) args.sinks = readable_sinks(*call.sinks, q, q.size(1), sinks_copy);
  refuse_unsupported(args, q.is_cuda());

  const Output out("out", q, args.q, args.v.size[3]);
  args.q = readable("q", q, args.q, q_copy);
  args.k = readable("k", call.k, args.k, k_copy);
  args.v = readable("v", call.v, args.v, v_copy);
  args.out = out.target();
  if (lse) {
    *lse = new_rows(q);
    args.lse = lse->data_ptr();
  }

  std::optional<Tensor> workspace;
  if (const size_t bytes = dhp_attention_workspace(&args, q.is_cuda())) {
    const int64_t sizes[] = {static_cast<int64_t>(bytes)};
    workspace = allocated(q, {sizes, 1}, ScalarType::Byte);
    args.workspace = workspace->data_ptr();
  }
  dhp_error error{};
  const dhp_status status = q.is_cuda() ? dhp_attention_cuda(&args, q.get_device_index(), current_stream(q), &error)
                                        : dhp_attention_cpu(&args, &on_torch_threads, &error);
  if (status != DHP_OK) fail(error.text);
  return out.finish();
}

} // namespace dhp
