/*
 * session.h - a device made ready, tensor maps, and the launch of any kernel. What the families' host code needs of
 * CUDA; it knows no family, and needs no CUDA header, so that a build without the toolkit compiles the same sources.
 */
#ifndef DHP_SESSION_H
#define DHP_SESSION_H

#include "../dhp_fa.h"

/* A device whose context is current, between dhp_session_begin and dhp_session_end. */
typedef struct dhp_session {
  const void *driver;
  int device;
  int pushed; /* whether its context had to be pushed */
} dhp_session;

/* DHP_NO_GPU if there is no driver, no such device, or no Hopper GPU. Nothing has to be ended after a failure. */
dhp_status dhp_session_begin(dhp_session *session, int device, dhp_error *error);
void dhp_session_end(const dhp_session *session);

/* A CUtensorMap, as the driver writes it. */
typedef struct dhp_tensor_map {
  _Alignas(128) uint64_t words[16];
} dhp_tensor_map;

/*
 * A map of the first `length` rows of each head of a 16-bit tensor, in boxes of `rows` rows of `heads` heads, 64
 * columns wide, for the 128-byte swizzle; elements outside read as zero.
 */
dhp_status dhp_tensor_map_encode(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor,
                                 int64_t length, int rows, int heads, dhp_error *error);

/* The same in boxes of one head that are 64, 32 or 16 columns wide, for the swizzle that is as wide. */
dhp_status dhp_tensor_map_encode_strips(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor,
                                        int64_t length, int columns, int rows, dhp_error *error);

/* A map of float32 [rows, columns], contiguous, in boxes of so many columns of one row, without a swizzle. */
dhp_status dhp_tensor_map_encode_floats(const dhp_session *session, dhp_tensor_map *map, const float *data,
                                        int64_t rows, int64_t columns, int box_columns, dhp_error *error);

/*
 * Enqueues a kernel of the table on a CUstream; arguments as cuLaunchKernel takes them. may_overlap: it may begin while
 * the launch before it ends, so the kernel has to wait for that before it touches memory (griddepcontrol.wait).
 * CT: looks at no argument.
 */
dhp_status dhp_session_launch(const dhp_session *session, const dhp_kernel_info *kernel, int64_t grid, void **arguments,
                              int may_overlap, void *stream, dhp_error *error);

#endif
