/*
 * tile_sinks.h - what rows of a query head add to the gradient of its sink: a sink is a score that all of them see, of
 * a value of 0.
 */
#ifndef DHP_CPU_TILE_SINKS_H
#define DHP_CPU_TILE_SINKS_H

#include "tile_gradients.h"

/*
 * The sum of exp(sink - lse) (grad_lse - rowsum(grad_out * out)) in float64, in ascending order. A row of lse -inf has
 * no term, and adds 0. CT: straight-line per vector and row.
 */
static double sink_gradient(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch) {
  const lanes_f32 sink = dhp_ct_splat(((const float *)rows->args->forward.sinks)[rows->head]);
  const lanes_f32 log2_e = dhp_ct_splat(1.44269504f), nothing = dhp_ct_splat(-__builtin_inff());
  sum_deltas(rows, scratch);
  for (int i = 0; i < round_up(rows->count, LANES); i += LANES) {
    const lanes_f32 lse = load(&scratch->lse[i]), p = dhp_ct_exp2((sink - lse) * log2_e);
    const dhp_ct_u32 is_empty = dhp_ct_equal_u32(dhp_ct_bits(lse), dhp_ct_bits(nothing));
    store(&scratch->weight[i], dhp_ct_select(is_empty, dhp_ct_splat(0.f), -p * load(&scratch->delta[i])));
  }
  double sum = 0.;
  for (int i = 0; i < rows->count; i++)
    sum += (double)scratch->weight[i];
  return sum;
}

#endif
