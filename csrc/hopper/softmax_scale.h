/* softmax_scale.h - the host's side of softmax_params.h: what the kernels are told of the scale of a call. */
#ifndef DHP_SOFTMAX_SCALE_H
#define DHP_SOFTMAX_SCALE_H

#include <float.h>
#include <math.h>

#include "softmax_params.h"

/* The fields of a family's parameters, by the same names. */
typedef struct dhp_softmax_scale {
  DHP_SOFTMAX_PARAMS
} dhp_softmax_scale;

static inline dhp_softmax_scale dhp_softmax_scale_of(double scale) {
  const double log2_e = 1.44269504088896341;
  /* not 0: a masked score is -inf, and -inf times 0 is NaN */
  const float scale_log2 = fmaxf((float)((double)(float)scale * log2_e), FLT_MIN);
  int exponent;
  frexpf(scale_log2, &exponent); /* 2^(exponent - 1) <= scale_log2 < 2^exponent: the difference below is exact */
  return (dhp_softmax_scale){
      .scale = (float)scale,
      .scale_log2 = scale_log2,
      .highest_score = FLT_MAX / fmaxf(1.f, ldexpf(1.f, exponent)),
      .scale_to_power_of_two = ldexpf(1.f, exponent) - scale_log2,
  };
}

#endif
