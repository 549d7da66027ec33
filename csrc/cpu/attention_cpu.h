/* attention_cpu.h - attention on the CPU; the caller (csrc/attention.c) has validated the arguments. */
#ifndef DHP_ATTENTION_CPU_H
#define DHP_ATTENTION_CPU_H

#include "../dhp_fa.h"

/*
 * Valid arguments with 1 <= D <= 256 and a non-empty output; Sk may be 0. executor NULL: everything in the calling
 * thread. Fails with DHP_OUT_OF_MEMORY alone, before the first output element is written.
 *
 * The bits of an output row depend on its query row, the keys and values it may see, D, dtype and scale: not on other
 * rows, heads, batch, the executor's partition, or what hidden keys and values hold. segments.h defines them.
 *
 * Numbers below 2^-126, float32's smallest normal one, count as zero on the way in and out (cpu/float_mode.h says why).
 *
 * CT: instructions and addresses depend on shapes, strides, dtype, flags, causal_offset and the executor's partition.
 */
dhp_status dhp_cpu_forward(const dhp_attention *args, const dhp_executor *executor, dhp_error *error);

/* The same of packed sequences; their lengths are valid, too. CT: also on the lengths. */
dhp_status dhp_cpu_varlen(const dhp_varlen *args, const dhp_executor *executor, dhp_error *error);

#endif
