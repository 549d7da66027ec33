/* layout.c - which tensors TMA can address in place (CUDA driver API, cuTensorMapEncodeTiled: alignment rules). */
#include "layout.h"

#include "../error.h"

enum {
  TMA_ALIGN_BYTES = 16,
  ELEMENT_BYTES = 2 /* float16, bfloat16 */
};

/* Global strides have 40 bits. */
#define TMA_STRIDE_LIMIT_BYTES (INT64_C(1) << 40)

int dhp_cuda_layout_supported(const dhp_tensor *tensor) {
  if ((uintptr_t)tensor->data % TMA_ALIGN_BYTES != 0) return 0;
  if (tensor->size[3] > 1 && tensor->stride[3] != 1) return 0;
  for (int i = 0; i < 3; i++) {
    if (tensor->size[i] <= 1) continue; /* a stride that is never taken */
    const int64_t stride = tensor->stride[i];
    if (stride <= 0 || stride >= TMA_STRIDE_LIMIT_BYTES / ELEMENT_BYTES) return 0;
    if (stride * ELEMENT_BYTES % TMA_ALIGN_BYTES != 0) return 0;
  }
  return 1;
}

dhp_status dhp_cuda_check_layouts(const char *const names[], const dhp_tensor *const tensors[], int count,
                                  dhp_error *error) {
  for (int i = 0; i < count; i++)
    if (tensors[i] && !dhp_cuda_layout_supported(tensors[i]))
      return dhp_fail(
          error, DHP_INVALID_ARGUMENT,
          "%s: data must be 16-byte aligned and strides positive multiples of 16 bytes; pass a contiguous copy",
          names[i]);
  return DHP_OK;
}
