/* launch.h - the kernel of delta, enqueued. */
#ifndef DHP_DELTA_LAUNCH_H
#define DHP_DELTA_LAUNCH_H

#include "../../cuda/session.h"
#include "../../dhp_fa.h"

/* Pairs of query rows in a head: what the statistics hold, four floats each. */
int64_t dhp_delta_pairs(const dhp_backward *args);

/* The kernel of a backward, or NULL if none serves it, and its CTAs. */
const dhp_kernel_info *dhp_delta_kernel(const dhp_backward *args);
int64_t dhp_delta_grid(const dhp_backward *args, const dhp_kernel_info *kernel);

/* Writes the statistics into the workspace. CT: reads shapes, strides and pointers only. */
dhp_status dhp_delta_launch(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                            void *stream, dhp_error *error);

#endif
