/* test_cpu.c - the test program of the CPU kernel, for tests/core/test_core_c.py. Argument: a seed (default 1). */
#include "test_cpu.h"

#include <stdio.h>
#include <stdlib.h>

#include "check.h"

dhp_cpu_kernel test_kernels[3];
int test_kernel_count;

void run_kernel(const dhp_cpu_kernel *kernel, const problem *p) {
  dhp_error error;
  const dhp_status status = dhp_cpu_forward_with(kernel, &p->args, &p->mask, NULL, &error);
  check(status == DHP_OK, "%s: status %d", kernel->instructions, (int)status);
}

int main(int argc, char **argv) {
  const unsigned long long seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  random_seed(seed);
  test_kernel_count = dhp_cpu_kernels(test_kernels);
  printf("seed %llu, kernels:", seed);
  for (int i = 0; i < test_kernel_count; i++)
    printf(" %s", test_kernels[i].instructions);
  printf("\n");

  test_numbers();
  test_masks();
  test_attention();
  test_rows();
  test_segments();
  test_float64();
  test_gradients();
  test_gradient_rows();
  test_sinks();
  test_refusals();
  test_varlen();
  test_varlen_gradients();
  test_runtime();
  return check_summary();
}
