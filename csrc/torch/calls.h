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
};

/* One call of attention; its tensors on one device. */
struct Call {
  Tensor q, k, v;
  Options options;
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

/* attention, and the lse where it is wanted. */
Tensor forward(const Call &call, Tensor *lse);

/* dq, dk and dv into `results`; what is not needed as an empty tensor of size [0]. */
void backward(const Call &call, const Gradients &gradients, Tensor results[3]);

} // namespace dhp

#endif
