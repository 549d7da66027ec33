/*
 * kernel_info.c - which GPU kernels there are, and which of a family serves a call. No family's host code is asked.
 */
#include <string.h>

#include "kernels/kernel_table.h"

const dhp_kernel_info *dhp_family_kernel(const dhp_family *family, dhp_dtype dtype, int64_t head_dim,
                                         const char *part) {
  const dhp_kernel_info *best = NULL;
  for (int i = 0; i < family->count; i++) {
    const dhp_kernel_info *const kernel = &family->kernels[i];
    if (kernel->dtype == dtype && kernel->head_dim >= head_dim && strcmp(kernel->part, part) == 0 &&
        (!best || kernel->head_dim < best->head_dim))
      best = kernel;
  }
  return best;
}

int dhp_kernel_count(void) { return dhp_kernel_table_size; }

const dhp_kernel_info *dhp_kernel(int index) {
  return index >= 0 && index < dhp_kernel_table_size ? &dhp_kernel_table[index] : NULL;
}

int dhp_cuda_max_head_dim(void) {
  int most = 0;
  for (int i = 0; i < dhp_kernel_table_size; i++)
    if (dhp_kernel_table[i].head_dim > most) most = dhp_kernel_table[i].head_dim;
  return most;
}
