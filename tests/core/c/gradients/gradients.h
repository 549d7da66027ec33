/*
 * gradients.h - the gradients of attention as their definition reads, in float64; and the problems to compare on.
 *
 * Takes q, k, v, grad_out and grad_lse of a problem alone: out and lse are computed anew, so that what the forward has
 * lost counts as an error of the gradients too.
 */
#ifndef DHP_TEST_GRADIENTS_H
#define DHP_TEST_GRADIENTS_H

#include "../../../../csrc/cpu/tile.h"
#include "../reference.h"

typedef struct gradient_problem {
  problem forward;   /* out and lse hold what the forward computed of q, k and v */
  dhp_backward args; /* its forward is a copy of that problem's arguments, its mask is forward.mask */
  storage grad_out, gradients[3];
  void *grad_lse; /* as lse */
} gradient_problem;

/* Normal random inputs; the gradients hold the byte 0xa5. The mask of the call, or the band between two bounds. */
gradient_problem gradients_new(shape s, dhp_dtype dtype, memory_layout layout);
gradient_problem gradients_new_band(shape s, int64_t lowest, int64_t highest, dhp_dtype dtype, memory_layout layout);
void gradients_free(gradient_problem *p);
/* Fills the gradients with 0xa5 again. */
void gradients_poison(gradient_problem *p);
/* Computes out and lse anew, after inputs have been set; with the kernel that dhp_cpu_forward uses. */
void gradients_forward(gradient_problem *p);
/* With this kernel; in float64, which has one alone, with that. */
dhp_status gradients_run(const dhp_cpu_kernel *kernel, const gradient_problem *p, const dhp_executor *executor);

/* The call for the gradient of these sinks, which the forward had or not. */
dhp_sinks_backward gradients_of_sinks(const gradient_problem *p, const void *sinks, void *dsinks);

/* dq, dk or dv by its place. */
dhp_tensor *gradient(gradient_problem *p, int which);
extern const char *const gradient_names[3];

/* Of one gradient; what was not wanted compares as equal. */
typedef struct gradient_comparison {
  double relative;    /* norm of (gradient - ref) over the norm of ref */
  double conditioned; /* the same over the norm of the sums of magnitudes: fair where the terms of ref cancel */
  int mismatches;     /* elements of which one is NaN or infinite and the other is not the same */
  int gaps;           /* bytes between the rows that were written */
} gradient_comparison;

/* dq, dk and dv, against the definition. */
void gradients_compare(gradient_problem *p, gradient_comparison results[3]);

#endif
