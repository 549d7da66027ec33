/* kernel_table.h - the shipped kernels; the table itself is written by kernels/build_cubins.py, empty without nvcc. */
#ifndef DHP_KERNEL_TABLE_H
#define DHP_KERNEL_TABLE_H

#include "../dhp_fa.h"

extern const dhp_kernel_info dhp_kernel_table[];
extern const int dhp_kernel_table_size;

#endif
