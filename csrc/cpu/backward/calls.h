/*
 * calls.h - the gradients of many calls at once, as of the sequences of a packed one: their units of work are divided
 * among threads together.
 */
#ifndef DHP_CPU_BACKWARD_CALLS_H
#define DHP_CPU_BACKWARD_CALLS_H

#include "../../mask.h"
#include "../tile.h"

/* One of them, which may be the only one. */
typedef struct dhp_cpu_gradient_call {
  dhp_backward args;
  dhp_mask mask;
  int64_t lse_pitch;     /* rows of its lse and grad_lse from a head to the next */
  int64_t first_lse_row; /* where its lse begins in that of all */
} dhp_cpu_gradient_call;

/* Calls that want the same gradients, at least one. */
typedef struct dhp_cpu_gradient_calls {
  dhp_cpu_gradient_call (*call)(const void *context, int64_t index);
  const void *context;
  int64_t count;
  int64_t lse_rows; /* of all, of all batches and heads */
} dhp_cpu_gradient_calls;

/* All of them in the passes of one, on a kernel for float32, float16 and bfloat16; as dhp_cpu_backward. */
dhp_status dhp_cpu_gradients_of_calls(const dhp_cpu_kernel *kernel, const dhp_cpu_gradient_calls *calls,
                                      const dhp_executor *executor, dhp_error *error);

#endif
