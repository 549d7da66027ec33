/*
 * divisors.cpp - divisor_of of divisor.cuh, compiled for the host, against dhp_divisor_of: for small numbers and random
 * ones, and with reciprocals that are an ulp too large or too small, as the instruction's may be. Status 1 and a
 * sentence at the first difference.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common_cuda.h"

static float towards; /* where the reciprocal is wrong */
static float reciprocal(float x) { return towards == 0.f ? 1.f / x : nextafterf(1.f / x, towards); }

#include "../ct.h"
#define dhp_ct_reciprocal reciprocal
#include "divisor.cuh"

enum { SMALL = 1 << 18, LONGEST_STEP = 1 << 13 };

int main(int, char **arguments) {
  srand((unsigned)strtoul(arguments[1], nullptr, 10));
  const float ways[] = {0.f, INFINITY, -INFINITY};
  for (float one : ways) {
    towards = one;
    for (int64_t d = 0; d <= INT32_MAX; d += d < SMALL ? 1 : 1 + rand() % LONGEST_STEP) {
      const dhp_divisor expected = dhp_divisor_of(d), found = divisor_of((int)d);
      if (found.multiplier == expected.multiplier && found.shift == expected.shift) continue;
      printf("violation: %lld\n", (long long)d);
      return 1;
    }
  }
  return 0;
}
