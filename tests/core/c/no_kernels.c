/* no_kernels.c - the table of a build without nvcc, which csrc/kernels/build_cubins.py writes otherwise. */
#include "../../../csrc/kernels/kernel_table.h"

const dhp_kernel_info dhp_kernel_table[1];
const int dhp_kernel_table_size = 0;
const dhp_family dhp_family_forward = {dhp_kernel_table, 0};
const dhp_family dhp_family_tiles = {dhp_kernel_table, 0};
const dhp_family dhp_family_decode = {dhp_kernel_table, 0};
const dhp_family dhp_family_fold = {dhp_kernel_table, 0};
