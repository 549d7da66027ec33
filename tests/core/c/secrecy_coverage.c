/*
 * secrecy_coverage.c - runs the traced cases of secrecy.h on one kernel, for a build that counts what was executed.
 *
 *     ./secrecy_coverage KERNEL          every traced case
 *     ./secrecy_coverage KERNEL first    the first alone, which leaves code unexecuted
 *     exit 77: this CPU does not run that kernel
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "secrecy.h"

enum { NO_SUCH_KERNEL = 77 };

static void attend(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype) {
  static dhp_cpu_scratch scratch;
  problem p = secrecy_problem(c, dtype, CONTIGUOUS);
  int32_t pages[MOST_PAGES];
  const problem placed = secrecy_in_pages(c, &p, pages);
  const dhp_cpu_rows rows = secrecy_rows(&placed);
  secrecy_attend(kernel, &rows, &scratch);
  problem_free(&p);
}

static void differentiate(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype) {
  static dhp_cpu_scratch scratch;
  static float lse[MOST_QUERIES], delta[MOST_QUERIES];
  gradient_problem p = secrecy_gradients(c, dtype, CONTIGUOUS);
  secrecy_differentiate(kernel, &p, lse, delta, &scratch);
  gradients_free(&p);
}

int main(int argc, char **argv) {
  random_seed(1);
  dhp_cpu_kernel kernels[3];
  const int count = dhp_cpu_kernels(kernels);
  const int cases = argc > 2 && strcmp(argv[2], "first") == 0 ? 1 : SECRECY_CASES;
  for (int k = 0; argc > 1 && k < count; k++) {
    if (strcmp(kernels[k].instructions, argv[1]) != 0) continue;
    for (int i = 0; i < cases; i++)
      for (int dtype = 0; dtype < secrecy_cases[i].traced; dtype++) {
        attend(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype);
        differentiate(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype);
      }
    return EXIT_SUCCESS;
  }
  return NO_SUCH_KERNEL;
}
