/*
 * gradients_out.cuh - a gradient of owned rows, from the accumulator to its tensor.
 *
 * Before this header: layout.cuh, walk.cuh.
 */
#ifndef DHP_BACKWARD_GRADIENTS_OUT_CUH
#define DHP_BACKWARD_GRADIENTS_OUT_CUH

#include "../../hopper/rows_out.cuh"
#include "walk.cuh"

/* This thread's row r of two, `row` of the tensor, times the factor; `columns` is 0 for a row beyond the tensor.
 * Nothing if the gradient is null. */
static __device__ __forceinline__ void store_gradient(void *gradient, const int64_t *stride, const walk *w, int row,
                                                      const float *x, int r, float factor, int columns, int lane) {
  const int64_t batch = w->batch, head = w->own_head;
  store_row((char *)gradient + 2 * (batch * stride[0] + head * stride[1] + row * stride[2]), x, r, factor, ~0u,
            gradient != 0 ? columns : 0, lane);
}

#endif
