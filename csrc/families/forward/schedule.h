/* schedule.h - a plan in the terms of the kernel. */
#ifndef DHP_FORWARD_SCHEDULE_H
#define DHP_FORWARD_SCHEDULE_H

#include "../../dhp_fa.h"
#include "params.h"

/* Writes those of the parameters from which the kernel finds a CTA's query tiles. The plan is one of these args. */
void dhp_set_schedule(dhp_fwd_params *params, const dhp_attention *args, const dhp_plan *plan);

#endif
