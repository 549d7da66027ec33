/*
 * products.cuh - the matrix products of a warpgroup, issued over a whole tile, 16 of the summed dimension a step.
 *
 * The single products come from wgmma.h, which csrc/kernels/wgmma.py writes for each kernel. PTX ISA 9.0, 9.7.15.5.
 */
#ifndef DHP_PRODUCTS_CUH
#define DHP_PRODUCTS_CUH

#include "stages.cuh"

enum { STEP = 16, STEPS_PER_BOX = BOX_COLUMNS / STEP, DESCRIPTOR_UNIT = 16 /* bytes that a descriptor counts in */ };

/* d = a b^T or d += a b^T; descriptors, or the half of one. */
typedef void product_of_shared(float *d, uint32_t a, uint32_t b, int accumulate);

/* `product`, below, is of this kind, or has registers as a; `high`, if it takes that, the other half of descriptors. */

/*
 * d = a b^T over `columns` of both, which lie in boxes of 64 columns in shared memory. The fence covers the products
 * that follow, too: all registers they read were written before.
 */
template <auto product, typename... High>
static __device__ __forceinline__ void issue_shared(float *d, uint32_t a, int a_box_bytes, uint32_t b, int b_box_bytes,
                                                    int columns, High... high) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < columns / STEP; step++) {
    const int box = step / STEPS_PER_BOX, in_box = step % STEPS_PER_BOX * STEP * 2;
    product(d, a + (box * a_box_bytes + in_box) / DESCRIPTOR_UNIT, b + (box * b_box_bytes + in_box) / DESCRIPTOR_UNIT,
            step != 0, high...);
  }
  wgmma_commit();
}

/*
 * The same, but d need not be defined before: until then, its registers serve others. The first step is `fresh`, which
 * only writes d. ptxas then knows that a product of one turn of a loop is nothing to the next turn; if d were read and
 * written, it would have to live all the time, and could not be changed in place without running products one by one.
 */
template <product_of_shared fresh, product_of_shared product>
static __device__ __forceinline__ void issue_shared_fresh(float *d, uint32_t a, int a_box_bytes, uint32_t b,
                                                          int b_box_bytes, int columns) {
  wgmma_fence();
  fresh(d, a, b, 0);
#pragma unroll
  for (int step = 1; step < columns / STEP; step++) {
    const int box = step / STEPS_PER_BOX, in_box = step % STEPS_PER_BOX * STEP * 2;
    product(d, a + (box * a_box_bytes + in_box) / DESCRIPTOR_UNIT, b + (box * b_box_bytes + in_box) / DESCRIPTOR_UNIT,
            1);
  }
  wgmma_commit();
}

/* d = a b^T over `columns` of both, a in registers, b in boxes as above. */
template <auto product, typename... High>
static __device__ __forceinline__ void issue_held(float *d, const uint32_t *a, uint32_t b, int b_box_bytes, int columns,
                                                  High... high) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < columns / STEP; step++) {
    const int box = step / STEPS_PER_BOX, in_box = step % STEPS_PER_BOX * STEP * 2;
    product(d, a + 4 * step, b + (box * b_box_bytes + in_box) / DESCRIPTOR_UNIT, step != 0, high...);
  }
  wgmma_commit();
}

/* d = a b, or d += a b, over `rows` of b, a tile in shared memory whose boxes the descriptor walks by itself. */
template <auto product, typename... High>
static __device__ __forceinline__ void issue_registers(float *d, const uint32_t *a, uint32_t b, int rows,
                                                       int accumulate, High... high) {
#pragma unroll
  for (int step = 0; step < rows / STEP; step++)
    product(d, a + 4 * step, b + step * STEP * ROW_BYTES / DESCRIPTOR_UNIT, step != 0 || accumulate, high...);
  wgmma_commit();
}

#endif
