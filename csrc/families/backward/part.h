/*
 * part.h - the launches of a backward in one pass one by one, for whoever has its keys or its queries in several places
 * and brings together what the launches write: maxima and integers, which are the same in any order.
 *
 * A part is a call of dhp_backward_cuda of which only one launch is made. It has to be given the shapes of all tensors
 * and reads or writes these, and these places of the workspace:
 *
 *     part     tensors read                    written  places read                        written
 *     BOUNDS   k, v                                                                         bounds, columns
 *     DELTA    out, lse, grad_out, grad_lse             bounds                              statistics, units, sums,
 *                                                                                           failed
 *     SHARES   q, k, v, grad_out               dk, dv   statistics, units, sums, failed     units, sums, failed, bounds
 *     DQ                                       dq       units, sums, failed, columns
 *
 * Statistics, units and sums are of query rows, bounds and columns of tiles of 128 keys counted from the first one.
 * A workspace has its places in the order of dhp_backward_offsets; those of query rows do not depend on k.
 */
#ifndef DHP_BACKWARD_PART_H
#define DHP_BACKWARD_PART_H

#include "../../dhp_fa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dhp_backward_part {
  DHP_PART_BOUNDS,
  DHP_PART_DELTA,
  DHP_PART_SHARES, /* adds to sums; bits of units that are set stay set, and failed stays NaN */
  DHP_PART_DQ,
  DHP_PARTS
} dhp_backward_part;

/* Tensors of a call, as bits. */
enum dhp_backward_tensor {
  DHP_OF_Q = 1,
  DHP_OF_K = 2,
  DHP_OF_V = 4,
  DHP_OF_OUT = 8,
  DHP_OF_GRAD_OUT = 16,
  DHP_OF_DQ = 32,
  DHP_OF_DK = 64,
  DHP_OF_DV = 128
};

/* Those that a part reads or writes; 0 of what is no part. Of the others shapes alone matter, and their data, as that
 * of lse, need only not be NULL. */
DHP_API unsigned dhp_backward_part_touches(dhp_backward_part part);

/* Where in the workspace places begin, in bytes; what they hold: workspace.h. */
typedef struct dhp_backward_offsets {
  int64_t statistics, failed, sums, units, bounds, columns;
} dhp_backward_offsets;

/* Of a call that has its workspace. CT: reads shapes and pointers only. */
DHP_API dhp_status dhp_backward_offsets_of(const dhp_backward *args, dhp_backward_offsets *offsets, dhp_error *error);

/* Refused where dhp_backward_cuda would not make that launch. CT: as dhp_backward_cuda. */
DHP_API dhp_status dhp_backward_part_cuda(const dhp_backward *args, dhp_backward_part part, int device, void *stream,
                                          dhp_error *error);

#ifdef __cplusplus
}
#endif

#endif
