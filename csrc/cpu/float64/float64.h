/*
 * float64.h - attention and its gradients in float64 on the CPU: to check gradients by differences, not for speed.
 *
 * The caller has validated the arguments; 1 <= D. One output row is one unit of work, in plain scalar code without
 * scratch memory: its sums run in the output itself, over the rows it sees in ascending order, so that its bits depend
 * on nothing else. There are no segments (cpu/segments.h): each sum is one, below the maximum over all keys. Numbers
 * below 2^-1022, float64's smallest normal one, count as zero (cpu/float_mode.h says why).
 *
 * CT: instructions and addresses depend on shapes, strides, flags, mask and the executor's partition.
 */
#ifndef DHP_FLOAT64_H
#define DHP_FLOAT64_H

#include "../../mask.h"
#include "../places.h"

/* Non-empty output; Sk may be 0. */
void dhp_float64_forward(const dhp_attention *args, const dhp_mask *mask, const dhp_cpu_places *places,
                         const dhp_executor *executor);

/* The wanted gradients; any length may be 0. lse_pitch: rows of lse and grad_lse from a head to the next. */
void dhp_float64_backward(const dhp_backward *args, const dhp_mask *mask, int64_t lse_pitch,
                          const dhp_executor *executor);

/*
 * What rows [first, first + count) of a query head add to the gradient of its sink, in the floating-point state of the
 * caller; of args q's sizes, out, lse, sinks, grad_out and grad_lse are looked at.
 */
double dhp_float64_sink_gradient(const dhp_backward *args, int64_t b, int64_t h, int64_t first, int64_t count);

#endif
