/* log2.h - kernels shift where the host knows a size to be a power of two. */
#ifndef DHP_LOG2_H
#define DHP_LOG2_H

#include <stdint.h>

static inline int dhp_log2_of(int64_t power) {
  int log = 0;
  while ((int64_t)1 << log < power)
    log++;
  return log;
}

#endif
