/*
 * kernel_table.h - the shipped kernels, family by family. The tables are written by kernels/build_cubins.py, and are
 * empty without nvcc.
 */
#ifndef DHP_KERNEL_TABLE_H
#define DHP_KERNEL_TABLE_H

#include "../dhp_fa.h"

enum { DHP_WARPGROUP_THREADS = 128 };

/* All kernels; those of a family stand together. */
extern const dhp_kernel_info dhp_kernel_table[];
extern const int dhp_kernel_table_size;

/* A family's part of the table. The host code of family NAME declares its own: extern const dhp_family dhp_family_NAME.
 */
typedef struct dhp_family {
  const dhp_kernel_info *kernels;
  int count;
} dhp_family;

/* The kernel of this dtype and part with the smallest head_dim that holds D; NULL if there is none. */
const dhp_kernel_info *dhp_family_kernel(const dhp_family *family, dhp_dtype dtype, int64_t head_dim, const char *part);

#endif
