#include "error.h"

#include <stdarg.h>
#include <stdio.h>

dhp_status dhp_fail(dhp_error *error, dhp_status status, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
  }
  return status;
}
