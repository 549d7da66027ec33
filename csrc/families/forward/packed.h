/* packed.h - the forward of packed sequences: a list of query tiles, and the kernel that goes through it. */
#ifndef DHP_FORWARD_PACKED_H
#define DHP_FORWARD_PACKED_H

#include "../../cuda/session.h"
#include "../../dhp_fa.h"

/* CT: reads shapes, strides, flags and pointers only; lengths and pages are read on the device. */
dhp_status dhp_packed_launch(const dhp_varlen *args, const dhp_packed_plan *plan, int device, void *stream,
                             dhp_error *error);

#endif
