/* test_cpu.h - the parts of the test program, each a few groups of checks. */
#ifndef DHP_TEST_CPU_H
#define DHP_TEST_CPU_H

#include "../../../csrc/cpu/tile.h"

void test_numbers(void);   /* csrc/ct.h and csrc/cpu/convert.h */
void test_attention(void); /* values, against reference.h */
void test_rows(void);      /* what a row's bits depend on; NaN and infinity */
void test_runtime(void);   /* executor, memory, floating-point state */

/* The kernels this CPU runs; every test of attention runs on all of them. */
extern dhp_cpu_kernel test_kernels[3];
extern int test_kernel_count;

/* Runs the kernel in the calling thread and checks its status. */
void run_kernel(const dhp_cpu_kernel *kernel, const dhp_attention *args);

#endif
