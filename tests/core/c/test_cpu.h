/* test_cpu.h - the parts of the test program, each a few groups of checks. */
#ifndef DHP_TEST_CPU_H
#define DHP_TEST_CPU_H

#include "../../../csrc/cpu/tile.h"
#include "reference.h"

void test_numbers(void);   /* csrc/ct.h and csrc/cpu/convert.h */
void test_attention(void); /* values, against reference.h */
void test_masks(void);     /* csrc/mask.h, and masks that no call asks for yet */
void test_rows(void);      /* what a row's bits depend on; NaN and infinity */
void test_segments(void);  /* rows that see several key segments */
void test_gradients(void); /* gradients/: values; bits, NaN and infinity; float64 */
void test_gradient_rows(void);
void test_sinks(void); /* their gradient */
void test_float64(void);
void test_refusals(void); /* csrc/check.c */
void test_varlen(void);   /* csrc/varlen.c */
void test_varlen_gradients(void);
void test_runtime(void); /* executor, memory, floating-point state */

/* The kernels this CPU runs; every test of attention runs on all of them. */
extern dhp_cpu_kernel test_kernels[3];
extern int test_kernel_count;

/* Of errors, relative: float32 arithmetic, or half an ulp of the output's dtype (2^-11, 2^-8) and a little. */
double tolerance(dhp_dtype dtype);

/* Runs the kernel in the calling thread and checks its status. */
void run_kernel(const dhp_cpu_kernel *kernel, const problem *p);

#endif
