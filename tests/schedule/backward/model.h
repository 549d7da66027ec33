/* model.h - what the backward's compiled kernels and their model know of each other. */
#ifndef SCHEDULE_BACKWARD_MODEL_H
#define SCHEDULE_BACKWARD_MODEL_H

#include "../simulator.h"

namespace backward {

enum Tensor { OWN_S, OWN_DP, WALK_S, WALK_DP, STATISTICS };

/* What the CTA owns, and what it walks: as in walk.cuh. */
struct Walk {
  int batch, own_head, own_row, head, heads, start, tiles, masked;
};
const Walk &walk();

/* The constants of one kernel. rows: owned rows of a warpgroup; tile: rows of a walked tile. */
struct Shape {
  int head_dim, tile, warpgroups, rows, stages, dp_stages;
  bool owns_keys, with_ds, with_p, with_dq;
  int box_columns, row_bytes;
  uint32_t own_box_bytes, walk_box_bytes, statistics_bytes, ds_bytes;
  uint32_t own_s, own_dp, walk_s, walk_dp, ds, shares, statistics, barriers; /* shared addresses */
};
extern const Shape shape;

enum { HEADS = 32, BATCHES = 4, ROWS_OF_HEAD = 1 << 11 }; /* of the tensors that the simulated CTA works on */

/* Where a gradient's row goes: addresses only, nothing is stored. In elements, which are 2 bytes. */
enum : int64_t { BATCH_STRIDE = 1 << 28, HEAD_STRIDE = 1 << 22, ROW_STRIDE = 1 << 10 };
enum : uintptr_t {
  FROM_DS = (uintptr_t)1 << 40,
  FROM_P = (uintptr_t)1 << 41,
  SUMS = (uintptr_t)1 << 42,
  FAILED = (uintptr_t)1 << 43,
  SPENT = (uintptr_t)1 << 44
};

/* The units of query rows, by batch, head and row: powers of two, of rows eight or sixteen apart different ones. */
const uint8_t *units();
inline int exponent_of_unit(int index) { return index % 17; }

int query_rows(); /* of a head, if the kernel computes dq besides */

void multiply_scores(float *s, uint32_t own_descriptor, uint32_t walk_descriptor, int accumulate);
void multiply_gradient(float *d, const uint32_t *scores, uint32_t walk_descriptor, int accumulate);
void multiply_dq(float *dq, uint32_t ds_descriptor, uint32_t k_descriptor, int accumulate);

} // namespace backward

#endif
