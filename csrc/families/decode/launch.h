/* launch.h - few queries over many keys: from public shape to an enqueued kernel. */
#ifndef DHP_DECODE_LAUNCH_H
#define DHP_DECODE_LAUNCH_H

#include "../../dhp_fa.h"
#include "../../mask.h"

/*
 * If a kernel of this family serves the call in fewer cycles, about, than `cycles`, which `forward` takes, plans its
 * launch and returns 1; else leaves the plan as it is and returns 0. A function of public shape alone.
 */
int dhp_decode_plan(const dhp_attention *args, const dhp_mask *mask, const dhp_kernel_info *forward, double cycles,
                    dhp_plan *plan);

/* Whether a plan is one of this family. */
int dhp_decode_is_planned(const dhp_plan *plan);

/* The plan is one of these args, and of this family. CT: reads shapes, strides and pointers only; q, k and v are
 * touched by the device alone. */
dhp_status dhp_decode_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                             dhp_error *error);

#endif
