/* error.h - the one way the host core reports a failure: a status and one sentence. */
#ifndef DHP_ERROR_H
#define DHP_ERROR_H

#include "dhp_fa.h"

/* Writes the sentence if the caller wants one, and returns `status`, so that `return dhp_fail(...)` reads as it acts.
 */
dhp_status dhp_fail(dhp_error *error, dhp_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#endif
