#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

enum { SHOWN_FAILURES = 5 };

static const char *group;
static int group_passed, group_failed, total_passed, total_failed;

static void end_group(void) {
  if (group)
    printf("%-4s %-46s %7d checks, %d failed\n", group_failed ? "FAIL" : "ok", group, group_passed + group_failed,
           group_failed);
  total_passed += group_passed;
  total_failed += group_failed;
  group_passed = group_failed = 0;
  fflush(stdout);
}

void check_group(const char *name) {
  end_group();
  group = name;
}

int check(int passed, const char *format, ...) {
  if (passed) {
    group_passed++;
  } else if (group_failed++ < SHOWN_FAILURES) {
    va_list arguments;
    va_start(arguments, format);
    printf("     %s: ", group);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
  }
  return passed;
}

int check_summary(void) {
  end_group();
  group = NULL;
  printf("%d passed, %d failed\n", total_passed, total_failed);
  return total_failed != 0 || total_passed == 0;
}

static uint64_t state = 1;

void random_seed(uint64_t seed) { state = seed; }

/* SplitMix64 (Steele, Lea, Flood 2014). */
uint64_t random_bits(void) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

int random_below(int n) { return (int)(random_bits() % (uint64_t)n); }

/* Box and Muller. */
double random_normal(void) {
  const double u = ((double)(random_bits() >> 11) + 0.5) * 0x1p-53, v = (double)(random_bits() >> 11) * 0x1p-53;
  return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
