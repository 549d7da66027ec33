/*
 * calls.h - what the operators compute: the options of a call, and one function each way.
 */
#ifndef DHP_TORCH_CALLS_H
#define DHP_TORCH_CALLS_H

#include "tensors.h"

namespace dhp {

/* What follows the tensors: the options of the schemas in dhp_safe_fa/_ops.py, in their order. */
struct Options {
  bool is_causal;
  std::optional<double> scale;
  int64_t causal_offset, window_left, window_right;
  std::optional<double> softcap;
};

/* One call of attention; its tensors on one device. */
struct Call {
  Tensor q, k, v;
  Options options;
  std::optional<Tensor> sinks; /* looked at by the forward alone */
};

/* One call of packed sequences; its tensors on one device. */
struct VarlenCall {
  Tensor q, k, v, cu_seqlens_q;
  std::optional<Tensor> cu_seqlens_k; /* or page_table, with seqused_k */
  int64_t max_seqlen_q, max_seqlen_k;
  Options options; /* without causal_offset */
  bool is_bottom_right;
  std::optional<Tensor> seqused_k, page_table, leftpad_k, sinks;
};

/* Results of packed sequences: [tokens, H, D] and [H, tokens]. */
struct Packed {
  Tensor out, lse;
};

/* The gradients that are wanted, of a call whose results were out and lse. */
struct Gradients {
  Tensor grad_out, out, lse;
  std::optional<Tensor> grad_lse;
  bool need[3]; /* dq, dk, dv */
};

/* The call as the C core is told of it: tensors described, not yet made readable. Refuses what they say of themselves.
 */
dhp_attention described(const Call &call);

/* Flags and numbers of a call whose q is described. */
void set_options(dhp_attention &args, const Options &options);

/* The data of [heads] numbers, one for each query head, in the dtype of lse; a copy in `keep` if they lie apart. */
const void *readable_sinks(const Tensor &sinks, const Tensor &q, int64_t heads, std::optional<Tensor> &keep);

/* attention, and the lse where it is wanted. */
Tensor forward(const Call &call, Tensor *lse);

Packed forward(const VarlenCall &call);

/* dq, dk and dv into `results`; what is not needed as an empty tensor of size [0]. */
void backward(const Call &call, const Gradients &gradients, Tensor results[3]);

void backward(const VarlenCall &call, const Gradients &gradients, Tensor results[3]);

/* A call whose sinks have a gradient, as far as that depends on it; its tensors on one device. */
struct SinksCall {
  Tensor grad_out, out, lse, sinks;
  std::optional<Tensor> grad_lse;
};

/* [Hq], in the dtype of lse. */
Tensor sinks_backward(const SinksCall &call);

} // namespace dhp

#endif
