/* launch.h - from a plan to an enqueued forward. */
#ifndef DHP_FORWARD_LAUNCH_H
#define DHP_FORWARD_LAUNCH_H

#include "../../dhp_fa.h"
#include "params.h"

/* The plan is one of these args, with a kernel. CT: reads shapes, strides and pointers only; q, k and v are touched by
 * the device alone. */
dhp_status dhp_forward_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                              dhp_error *error);

/* Those of the parameters that neither a schedule nor a mask decides; so many rows of a head are in a warpgroup. */
dhp_fwd_params dhp_forward_params(const dhp_attention *args, int rows);

#endif
