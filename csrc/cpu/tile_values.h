/* tile_values.h - the sum of p v over a key tile. */
#ifndef DHP_CPU_TILE_VALUES_H
#define DHP_CPU_TILE_VALUES_H

#include "tile_keys.h"

/* Is a sum over keys begun, or continued? */
enum { CONTINUED = 0, FRESH = 1 };

/* partial[row..][d..] += p v over keys [from, to), or = if that is FRESH. CT: bounds are public. */
/* clang-format off */
DHP_CT void value_block(dhp_cpu_scratch *scratch, int row, int d, int from, int to, const int is_fresh, const int rows,
                        const int vectors) {
  lanes_f32 sum[VALUE_ROWS][VALUE_VECTORS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int i = 0; i < vectors; i++)
      sum[r][i] = is_fresh ? dhp_ct_splat(0.f) : load(&scratch->partial[row + r][d + i * LANES]);
  for (int key = from; key < to; key++) {
    lanes_f32 v[VALUE_VECTORS];
    UNROLL for (int i = 0; i < vectors; i++) v[i] = load(&scratch->v[key][d + i * LANES]);
    UNROLL for (int r = 0; r < rows; r++) {
      const lanes_f32 p = dhp_ct_splat(scratch->p[key][row + r]);
      UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = dhp_ct_fma(p, v[i], sum[r][i]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int i = 0; i < vectors; i++)
      store(&scratch->partial[row + r][d + i * LANES], sum[r][i]);
}
/* clang-format on */

DHP_CT void value_rows(dhp_cpu_scratch *scratch, int row, int width, int from, int to, const int is_fresh,
                       const int rows) {
  int d = 0;
  for (; d + VALUE_VECTORS * LANES <= width; d += VALUE_VECTORS * LANES)
    value_block(scratch, row, d, from, to, is_fresh, rows, VALUE_VECTORS);
  for (; d < width; d += LANES)
    value_block(scratch, row, d, from, to, is_fresh, rows, 1);
}

/* Compiled apart from what decides over rows: inlined there, register blocks took some 3 % longer. */
#define APART static __attribute__((noinline))
APART void begin_block(dhp_cpu_scratch *scratch, int row, int width, int from, int to) {
  value_rows(scratch, row, width, from, to, FRESH, VALUE_ROWS);
}
APART void continue_block(dhp_cpu_scratch *scratch, int row, int width, int from, int to) {
  value_rows(scratch, row, width, from, to, CONTINUED, VALUE_ROWS);
}
APART void begin_row(dhp_cpu_scratch *scratch, int row, int width, int from, int to) {
  value_rows(scratch, row, width, from, to, FRESH, 1);
}
APART void continue_row(dhp_cpu_scratch *scratch, int row, int width, int from, int to) {
  value_rows(scratch, row, width, from, to, CONTINUED, 1);
}

/*
 * out = out * rescale + p v. A row takes its keys in ascending order, however rows are put into blocks: first those
 * that rows behind it no longer see, then those that its whole block sees, then those that rows before it do not see
 * yet. The tile's part is summed by itself first, which keeps rounding small over long sequences. A row that sees
 * nothing of the tile keeps the bits it has.
 */
static void add_values(dhp_cpu_scratch *scratch, const tile_keys *seen, int rows, int width) {
  const int32_t *const first = seen->first, *const last = seen->last;
  int row = 0;
  while (row < rows) {
    if (first[row] == last[row]) {
      row++;
      continue;
    }
    const int is_block = row + VALUE_ROWS <= rows && first[row + VALUE_ROWS - 1] < last[row];
    const int end = is_block ? row + VALUE_ROWS : row + 1, from = first[end - 1], to = last[row];
    const int is_fresh = first[row] == from;
    for (int r = row; r < end && !is_fresh; r++)
      begin_row(scratch, r, width, first[r], from); /* of the last row nothing, but its sum begins at zero */
    if (is_block && is_fresh)
      begin_block(scratch, row, width, from, to);
    else if (is_block)
      continue_block(scratch, row, width, from, to);
    else
      begin_row(scratch, row, width, from, to);
    for (; row < end; row++) {
      if (to < last[row]) continue_row(scratch, row, width, to, last[row]);
      const lanes_f32 rescale = dhp_ct_splat(scratch->rescale[row]);
      for (int d = 0; d < width; d += LANES) {
        float *const out = &scratch->out[row][d];
        store(out, dhp_ct_fma(load(out), rescale, load(&scratch->partial[row][d])));
      }
    }
  }
}

#endif
