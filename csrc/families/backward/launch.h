/* launch.h - from a plan to an enqueued backward. */
#ifndef DHP_BACKWARD_LAUNCH_H
#define DHP_BACKWARD_LAUNCH_H

#include "../../dhp_fa.h"

/* The plan is one of these args. CT: reads shapes, strides and pointers only; the tensors are touched by the device
 * alone. */
dhp_status dhp_backward_launch(const dhp_backward *args, const dhp_backward_plan *plan, int device, void *stream,
                               dhp_error *error);

#endif
