/* check.h - counting checks, and a reproducible source of random numbers. */
#ifndef DHP_TEST_CHECK_H
#define DHP_TEST_CHECK_H

#include <stdint.h>

/* Starts a group: its line is printed when the next one starts, or by check_summary. */
void check_group(const char *name);

/* Counts a check; a failure prints the formatted text (the first few of a group). Returns `passed`. */
int check(int passed, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints "N passed, N failed" and returns the exit status: 0 if no check failed. */
int check_summary(void);

/* Sets the seed of what follows. */
void random_seed(uint64_t seed);
uint64_t random_bits(void);
/* Uniform in [0, n). */
int random_below(int n);
/* Standard normal. */
double random_normal(void);

#endif
