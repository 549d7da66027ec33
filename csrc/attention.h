/* attention.h - checks shared by every way of running a call. */
#ifndef DHP_ATTENTION_H
#define DHP_ATTENTION_H

#include "dhp_fa.h"

/* Shapes, dtypes, strides and scale agree; looks at no element and at no limit of one backend. */
dhp_status dhp_validate(const dhp_attention *args, dhp_error *error);

#endif
