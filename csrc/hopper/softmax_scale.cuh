/*
 * softmax_scale.cuh - the scale that a row's scores are multiplied by. Before this header: kernel_params, the family's
 * parameters, which hold those of softmax_params.h.
 *
 * CT: shifts meet multiplications, comparisons that become numbers, and fused multiply-adds.
 */
#ifndef DHP_SOFTMAX_SCALE_CUH
#define DHP_SOFTMAX_SCALE_CUH

#include "../ct.h"
#include "ptx.cuh"

/*
 * fma(s, scale, -shift scale) rounds shift scale first. That error is common to the row and cancels, unless it is so
 * large that exp2 leaves its range. Where the product exceeds 2^30, neighbouring floats differ by 128 and more, so the
 * row's softmax is 1 or 0; any scale gives that, and with a power of two the product is exact. Chosen by arithmetic: of
 * a select between two launch parameters ptxas makes a load under a predicate on the value.
 */
static __device__ __forceinline__ float scale_of(float shift, const kernel_params *p) {
  const float huge = 1073741824.f;
  return fmaf(greater(fabsf(shift * p->scale_log2), huge), p->scale_to_power_of_two, p->scale_log2);
}

#endif
