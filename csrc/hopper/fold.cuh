/*
 * fold.cuh - two parts of a row, over different keys, made one. A row is a fold over key segments: docs/kernel.md.
 * Before this header: kernel_params, the family's parameters, which hold those of softmax_params.h.
 *
 * CT: sums and outputs meet max, multiplications, fused multiply-adds and ex2.
 */
#ifndef DHP_FOLD_CUH
#define DHP_FOLD_CUH

#include "softmax_scale.cuh"

/* What the O and the sum of each part are multiplied by. The part with the larger shift keeps its bits: 1. */
typedef struct fold_weights {
  float before, later;
} fold_weights;

/*
 * A part later in the order of visits is folded into what came before it: shift and sum of the row move on from those
 * of the later part. A part without a key, -highest_score and 0, changes nothing, on either side. Products are rounded
 * before they are subtracted, as in the exponents of the probabilities: equal shifts give 2^0.
 */
static __device__ __forceinline__ fold_weights fold_sums(float *shift, float *sum, float shift_before, float sum_before,
                                                         const kernel_params *p) {
  const float top = fmaxf(*shift, shift_before), scale = scale_of(top, p), scaled = __fmul_rn(top, scale);
  const fold_weights by = {dhp_ct_exp2(__fmul_rn(shift_before, scale) - scaled),
                           dhp_ct_exp2(__fmul_rn(*shift, scale) - scaled)};
  *sum = fmaf(sum_before, by.before, __fmul_rn(*sum, by.later));
  *shift = top;
  return by;
}

/* An element of O, likewise. */
static __device__ __forceinline__ float folded(float before, float later, fold_weights by) {
  return fmaf(before, by.before, __fmul_rn(later, by.later));
}

#endif
