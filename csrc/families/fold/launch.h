/* launch.h - the last launch of a call whose key segments went to different CTAs: rows out of their parts. */
#ifndef DHP_FOLD_LAUNCH_H
#define DHP_FOLD_LAUNCH_H

#include "../../cuda/session.h"
#include "../../dhp_fa.h"

/* About how many cycles that takes, of so many parts. */
double dhp_fold_cycles(int64_t parts, int head_dim);

/* Whether there are so few parts, and key tiles, that the kernels can count them. */
int dhp_fold_can_split(int64_t parts, int64_t key_tiles);

/* After the launch of this plan of these args. CT: reads shapes, strides and pointers only. */
dhp_status dhp_fold_launch(const dhp_session *session, const dhp_attention *args, const dhp_plan *plan, void *stream,
                           dhp_error *error);

#endif
