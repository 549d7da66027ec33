/*
 * forms.cuh - soft caps and sinks. Before this header: kernel_params, SCORES, THREAD_ROWS, and FORM, what a kernel is
 * for beside plain attention: sinks alone, or a soft cap, with sinks or without.
 *
 * CT: scores and sinks meet multiplications, additions, fused multiply-adds, clamps, ex2 and rcp, and selects by the
 * lane and by whether a row is of a sequence. A sink is loaded from an address that is public, if there are any.
 */
#ifndef DHP_FORWARD_FORMS_CUH
#define DHP_FORWARD_FORMS_CUH

#include "../../hopper/softmax.cuh"
#include "params.h"

#define LOG2_E 1.44269504f

/* A head's sink, or -inf without sinks, or if it is not wanted. */
static __device__ __forceinline__ float sink_of(int wanted, const dhp_fwd_forms *forms, int head) {
  return load_one_if(forms->has_sinks & wanted, forms->sinks + head, -INFINITY);
}

/*
 * What a row's sums begin with, in the segment of the last key that it sees: its head's sink is one more term
 * exp(sink), with a value of 0, and the highest score so far. It is brought to the unit of scores, where its rounding
 * cancels as that of any shift does. A sink of -inf is as none. The term is in the sum of one lane of the quad.
 */
static __device__ __forceinline__ void begin_with_sink(row_stats *stats, int r, int is_first_segment,
                                                       const kernel_params *p, const dhp_fwd_forms *forms, int head,
                                                       int lane) {
  const float sink = sink_of(is_first_segment, forms, head) * LOG2_E;
  const float shift = fmaxf(fminf(sink * forms->scores_of_log2, p->highest_score), -p->highest_score);
  const float term = dhp_ct_exp2(fmaf(-shift, scale_of(shift, p), sink));
  stats->shift[r] = shift;
  stats->sum[r] = lane % 4 == 0 ? term : 0.f;
  stats->rescale[r] = 0.f;
}

/* lse of a row that sees no key: its head's sink, but of rows of no sequence -inf. */
static __device__ __forceinline__ float lse_of_none(const dhp_fwd_forms *forms, int head, int is_of_none) {
  return sink_of(!is_of_none, forms, head);
}

/*
 * Scores s to cap tanh(s scale / cap). tanh(x) = 1 - 2 / (e^2x + 1): where e^2x is infinite it is 1, where it is 0 -1,
 * and its error is some 1e-7 at any x, where tanh.approx has 2^-11 of a score that may be 50. Of a score the error is
 * 1e-7 cap: 5e-6 where the cap is 50, but 0.01 where it is 1e5.
 */
static __device__ __forceinline__ void cap_scores(float *s, const dhp_fwd_forms *forms) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    const float part = dhp_ct_reciprocal(dhp_ct_exp2(s[i] * forms->exponent_of_score) + 1.f);
    s[i] = fmaf(part, -2.f * forms->cap, forms->cap);
  }
}

#endif
