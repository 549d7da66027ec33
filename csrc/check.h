/* check.h - what every way of running a call demands of its arguments. */
#ifndef DHP_CHECK_H
#define DHP_CHECK_H

#include "dhp_fa.h"

enum { DHP_CPU_MAX_HEAD_DIM = 256 };

/* Shapes, dtypes, strides and scale agree; looks at no element and at no limit of one backend. */
dhp_status dhp_check_arguments(const dhp_attention *args, dhp_error *error);

#endif
