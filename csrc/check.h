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

/* v as wide as q: no GPU kernel serves another. */
dhp_status dhp_check_cuda_widths(const dhp_attention *args, dhp_error *error);

/* Which calls of what the kernels of batches have not are served on CUDA all the same. */
#define DHP_BY_PACKED "but by attention_varlen and, where no gradient is recorded, by dhp_safe_fa.attention"

/* What every GPU kernel demands of a batched call that dhp_check_arguments has let pass: a build with kernels, its
 * dtypes and head dimensions, and neither a soft cap nor sinks: only kernels of packed sequences serve these. */
dhp_status dhp_check_cuda_call(const dhp_attention *args, dhp_error *error);

/* Heads of all batches, of a call with rows: so few that their number times that of a head's rows is an int64. */
dhp_status dhp_check_cuda_heads(const dhp_attention *args, dhp_error *error);

/* Tiles of a launch: kernels count them in int32, up to twice the size of the grid past the last. */
enum { DHP_CUDA_MAX_ITEMS = INT32_MAX - 1024 };

#endif
