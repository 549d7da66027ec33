/* launch.h - the kernel of bounds, enqueued. */
#ifndef DHP_BOUNDS_LAUNCH_H
#define DHP_BOUNDS_LAUNCH_H

#include "../../cuda/session.h"
#include "../../dhp_fa.h"

/* The kernel of a backward, or NULL if none serves it, the tiles of keys of a head, and its CTAs. */
const dhp_kernel_info *dhp_bounds_kernel(const dhp_backward *args);
int64_t dhp_bounds_tiles(const dhp_backward *args, const dhp_kernel_info *kernel);
int64_t dhp_bounds_grid(const dhp_backward *args, const dhp_kernel_info *kernel);

/* Writes bounds and totals into the workspace. CT: reads shapes, strides and pointers only. */
dhp_status dhp_bounds_launch(const dhp_session *session, const dhp_backward *args, const dhp_kernel_info *kernel,
                             void *stream, dhp_error *error);

#endif
