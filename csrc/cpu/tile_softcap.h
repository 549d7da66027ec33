/* tile_softcap.h - soft caps: softcap tanh(score / softcap) in place of a score. */
#ifndef DHP_CPU_TILE_SOFTCAP_H
#define DHP_CPU_TILE_SOFTCAP_H

#include "tanh.h"
#include "tile_vectors.h"

/*
 * Scores come times scale / softcap, and become capped ones in units of log(2): cap2 is softcap log2(e). The first n
 * rows, of so many columns, a multiple of a vector. CT: straight-line per vector; n and columns are public.
 */
static void cap_scores(float (*scores)[DHP_CPU_PITCH_Q], int n, int columns, float cap2) {
  for (int row = 0; row < n; row++)
    for (int i = 0; i < columns; i += LANES)
      store(scores[row] + i, dhp_ct_tanh(load(scores[row] + i)) * dhp_ct_splat(cap2));
}

#endif
