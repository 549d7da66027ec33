/* tile_values.h - the sum of p v over a key tile. */
#ifndef DHP_CPU_TILE_VALUES_H
#define DHP_CPU_TILE_VALUES_H

#include "tile_keys.h"

/* Is a sum over keys begun, or continued? */
enum { CONTINUED = 0, FRESH = 1 };

/* out[row] = out[row] * rescale[row] + sum over keys of p[key][row] v[key]. A backward has other rows in these places.
 */
typedef struct tile_values {
  float (*out)[DHP_CPU_PITCH_D];     /* [row][d] */
  float (*partial)[DHP_CPU_PITCH_D]; /* [row][d]: the sum over the tile */
  float (*p)[DHP_CPU_PITCH_Q];       /* [key][row] */
  float (*v)[DHP_CPU_PITCH_D];       /* [key][d] */
  const float *rescale;              /* [row] */
} tile_values;

/* partial[row..][d..] += p v over keys [from, to), or = if that is FRESH. CT: bounds are public. */
/* clang-format off */
DHP_CT void value_block(const tile_values *tile, int row, int d, int from, int to, const int is_fresh, const int rows,
                        const int vectors) {
  float (*const partial)[DHP_CPU_PITCH_D] = tile->partial, (*const p)[DHP_CPU_PITCH_Q] = tile->p;
  float (*const v)[DHP_CPU_PITCH_D] = tile->v;
  lanes_f32 sum[VALUE_ROWS][VALUE_VECTORS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int i = 0; i < vectors; i++)
      sum[r][i] = is_fresh ? dhp_ct_splat(0.f) : load(&partial[row + r][d + i * LANES]);
  for (int key = from; key < to; key++) {
    lanes_f32 value[VALUE_VECTORS];
    UNROLL for (int i = 0; i < vectors; i++) value[i] = load(&v[key][d + i * LANES]);
    UNROLL for (int r = 0; r < rows; r++) {
      const lanes_f32 factor = dhp_ct_splat(p[key][row + r]);
      UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = dhp_ct_fma(factor, value[i], sum[r][i]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int i = 0; i < vectors; i++)
      store(&partial[row + r][d + i * LANES], sum[r][i]);
}
/* clang-format on */

DHP_CT void value_rows(const tile_values *tile, int row, int width, int from, int to, const int is_fresh,
                       const int rows) {
  int d = 0;
  for (; d + VALUE_VECTORS * LANES <= width; d += VALUE_VECTORS * LANES)
    value_block(tile, row, d, from, to, is_fresh, rows, VALUE_VECTORS);
  for (; d < width; d += LANES)
    value_block(tile, row, d, from, to, is_fresh, rows, 1);
}

/* Compiled apart from what decides over rows: inlined there, register blocks took some 3 % longer. */
#define APART static __attribute__((noinline))
APART void begin_block(const tile_values *tile, int row, int width, int from, int to) {
  value_rows(tile, row, width, from, to, FRESH, VALUE_ROWS);
}
APART void continue_block(const tile_values *tile, int row, int width, int from, int to) {
  value_rows(tile, row, width, from, to, CONTINUED, VALUE_ROWS);
}
APART void begin_row(const tile_values *tile, int row, int width, int from, int to) {
  value_rows(tile, row, width, from, to, FRESH, 1);
}
APART void continue_row(const tile_values *tile, int row, int width, int from, int to) {
  value_rows(tile, row, width, from, to, CONTINUED, 1);
}

/*
 * out = out * rescale + p v. A row takes its keys in ascending order, however rows are put into blocks: first those
 * that rows behind it no longer see, then those that its whole block sees, then those that rows before it do not see
 * yet. The tile's part is summed by itself first, which keeps rounding small over long sequences. A row that sees
 * nothing of the tile keeps the bits it has.
 */
static void add_values(const tile_values *tile, const tile_keys *seen, int rows, int width) {
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
      begin_row(tile, r, width, first[r], from); /* of the last row nothing, but its sum begins at zero */
    if (is_block && is_fresh)
      begin_block(tile, row, width, from, to);
    else if (is_block)
      continue_block(tile, row, width, from, to);
    else
      begin_row(tile, row, width, from, to);
    for (; row < end; row++) {
      if (to < last[row]) continue_row(tile, row, width, to, last[row]);
      const lanes_f32 rescale = dhp_ct_splat(tile->rescale[row]);
      for (int d = 0; d < width; d += LANES) {
        float *const out = &tile->out[row][d];
        store(out, dhp_ct_fma(load(out), rescale, load(&tile->partial[row][d])));
      }
    }
  }
}

#endif
