/* divisor.h - what the device needs to divide by a number that is known before: see quotient in divisor.cuh. */
#ifndef DHP_DIVISOR_H
#define DHP_DIVISOR_H

#include <stdint.h>

/* A divisor d >= 1: n / d is the high half of 2 n multiplier, shifted right, for every n < 2^31. */
typedef struct dhp_divisor {
  uint32_t multiplier, shift;
} dhp_divisor;

/*
 * With 2^(shift - 1) < d <= 2^shift, multiplier = floor(2^(31 + shift) / d) + 1 fits 32 bits, and d times it exceeds
 * 2^(31 + shift) by at most 2^shift: so n multiplier / 2^(31 + shift) rounds down to n / d for n < 2^31 (Granlund and
 * Montgomery, "Division by Invariant Integers using Multiplication", 1994, theorem 4.2). Of 0, by which nothing is
 * divided, as of 1.
 */
static inline dhp_divisor dhp_divisor_of(int64_t d) {
  dhp_divisor by = {0, 0};
  if (d == 0) d = 1;
  while ((int64_t)1 << by.shift < d)
    by.shift++;
  by.multiplier = (uint32_t)(((uint64_t)1 << (31 + by.shift)) / (uint64_t)d + 1);
  return by;
}

#endif
