/* launch.h - from a plan to an enqueued kernel. */
#ifndef DHP_LAUNCH_H
#define DHP_LAUNCH_H

#include "../dhp_fa.h"

/* CT: reads shapes, strides and pointers only; q, k and v are touched by the device alone. */
dhp_status dhp_cuda_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream, dhp_error *error);

#endif
