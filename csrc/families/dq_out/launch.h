/* launch.h - the kernel of dq_out, enqueued. */
#ifndef DHP_DQ_OUT_LAUNCH_H
#define DHP_DQ_OUT_LAUNCH_H

#include "../../cuda/session.h"
#include "../../dhp_fa.h"

/* Groups of sixteen query rows in a head, and integers of all sums. */
int64_t dhp_dq_out_blocks(const dhp_backward *args);
int64_t dhp_dq_out_integers(const dhp_backward *args, const dhp_kernel_info *kernel);

/* The kernel of a backward, or NULL if none serves it, and its CTAs. */
const dhp_kernel_info *dhp_dq_out_kernel(const dhp_backward *args);
int64_t dhp_dq_out_grid(const dhp_backward *args, const dhp_kernel_info *kernel);

/* Writes dq from the sums. CT: reads shapes, strides and pointers only. */
dhp_status dhp_dq_out_launch(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                             void *stream, dhp_error *error);

#endif
