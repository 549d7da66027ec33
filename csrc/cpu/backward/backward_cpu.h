/* backward_cpu.h - the gradients of attention on the CPU; the caller (csrc/backward.c) has validated the arguments. */
#ifndef DHP_BACKWARD_CPU_H
#define DHP_BACKWARD_CPU_H

#include "../../dhp_fa.h"

/*
 * Valid arguments with 1 <= D <= 256; any length may be 0. executor NULL: everything in the calling thread. Fails with
 * DHP_OUT_OF_MEMORY alone, before the first element of a gradient is written.
 *
 * The bits of a row of dq depend on its rows of q, grad_out, out, lse and grad_lse and the keys and values that it may
 * see; those of a row of dk or dv on its key and value and on such rows of the queries that may see it, in all heads
 * that read this key head. Not on other rows, heads, batch, the executor's partition, which gradients are wanted, or
 * what hidden rows hold.
 *
 * CT: as dhp_cpu_forward.
 */
dhp_status dhp_cpu_backward(const dhp_backward *args, const dhp_executor *executor, dhp_error *error);

/* The same of packed sequences; their lengths are valid, too. CT: also on the lengths. */
dhp_status dhp_cpu_varlen_backward(const dhp_varlen_backward *args, const dhp_executor *executor, dhp_error *error);

/*
 * The gradient of the sinks of valid arguments; any length may be 0. Fails with DHP_OUT_OF_MEMORY alone, before the
 * first element is written.
 *
 * The bits of a head's depend on its sink and its rows of grad_out, out, lse and grad_lse, not on other heads or the
 * executor's partition. Rows are added up in float64: those of a tile of DHP_CPU_TILE_Q rows, which begins at a
 * multiple of it, in ascending order; then the tiles, batch by batch, in ascending order.
 *
 * CT: as dhp_cpu_forward.
 */
dhp_status dhp_cpu_sinks_backward(const dhp_sinks_backward *args, const dhp_executor *executor, dhp_error *error);

#endif
