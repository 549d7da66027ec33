/* launch.h - from a plan to an enqueued forward. */
#ifndef DHP_FORWARD_LAUNCH_H
#define DHP_FORWARD_LAUNCH_H

#include "../../dhp_fa.h"

/* The plan is one of these args, with a kernel. CT: reads shapes, strides and pointers only; q, k and v are touched by
 * the device alone. */
dhp_status dhp_forward_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                              dhp_error *error);

#endif
