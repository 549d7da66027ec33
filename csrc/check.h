/* check.h - what every way of running a call demands of its arguments. */
#ifndef DHP_CHECK_H
#define DHP_CHECK_H

#include "dhp_fa.h"

enum { DHP_CPU_MAX_HEAD_DIM = 256 };

const char *dhp_dtype_name(dhp_dtype dtype);

/* Shapes, dtypes, strides and scale agree; looks at no element and at no limit of one backend. */
dhp_status dhp_check_arguments(const dhp_attention *args, dhp_error *error);

/* The same of packed sequences, whose shapes are told as [S, H, D]; or, of k and v in pages, [pages, S, H, D]. */
dhp_status dhp_check_packed(const dhp_attention *packed, int is_paged, dhp_error *error);

/* The same of a backward: of its forward, which must have an lse, of grad_out, and of the wanted gradients. */
dhp_status dhp_check_gradients(const dhp_backward *args, dhp_error *error);

/* The same of packed sequences, without pages. */
dhp_status dhp_check_packed_gradients(const dhp_backward *args, dhp_error *error);

/* The same of the gradient of sinks, all of it; on CUDA there is none. */
dhp_status dhp_check_sinks_gradient(const dhp_sinks_backward *args, int on_cuda, dhp_error *error);

/* Head dimensions that the CPU kernel serves. */
dhp_status dhp_check_cpu_head_dims(const dhp_attention *args, dhp_error *error);

/* No soft cap or sinks, and v as wide as q: the rest no GPU kernel serves. */
dhp_status dhp_check_cuda_forms(const dhp_attention *args, dhp_error *error);

/* The same, and no window: only kernels of packed sequences serve one. */
dhp_status dhp_check_cuda_options(const dhp_attention *args, dhp_error *error);

#endif
