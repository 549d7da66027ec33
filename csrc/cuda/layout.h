/* layout.h - which tensors a kernel can address in place. */
#ifndef DHP_CUDA_LAYOUT_H
#define DHP_CUDA_LAYOUT_H

#include "../dhp_fa.h"

/* DHP_OK if dhp_cuda_layout_supported holds of each tensor, NULL ones apart; else the sentence names the first. */
dhp_status dhp_cuda_check_layouts(const char *const names[], const dhp_tensor *const tensors[], int count,
                                  dhp_error *error);

#endif
