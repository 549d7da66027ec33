/*
 * packed.h - a call of packed torch tensors as a dhp_varlen, for its forward and its gradients.
 */
#ifndef DHP_TORCH_PACKED_H
#define DHP_TORCH_PACKED_H

#include "calls.h"

namespace dhp {

/* [S, H, D] as [1, H, S, D]. */
dhp_tensor describe_packed(const char *name, const Tensor &t);

/* The same, ready to be read; a copy in `keep` if rows are not contiguous. */
dhp_tensor readable_packed(const char *name, const Tensor &t, const dhp_tensor &d, std::optional<Tensor> &keep);

/* What a call is to the C core, and the copies that it reads. */
class PackedCall {
public:
  /* Tensors described, lengths ready to be read; out is described as q is, with v's head_dim. Refuses what they say of
   * themselves. */
  explicit PackedCall(const VarlenCall &call);
  const dhp_varlen &args() const { return args_; }
  /* Gives `packed` q, k and v that are ready to be read, as long as this lives. */
  void make_readable(dhp_attention &packed);

private:
  void set_keys();

  const VarlenCall &call_;
  dhp_varlen args_{};
  std::optional<Tensor> q_, k_, v_, cu_seqlens_q_, cu_seqlens_k_, seqused_k_, page_table_, leftpad_k_;
};

} // namespace dhp

#endif
