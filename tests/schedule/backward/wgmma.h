/*
 * wgmma.h - stands in for the generated matrix products: the simulator learns which tiles a product reads, and its
 * results are constants.
 */
static inline void wgmma_scores(float *s, uint32_t own, uint32_t walk, int accumulate) {
  backward::multiply_scores(own, walk, accumulate);
  for (int i = 0; i < TILE_K / 2; i++)
    s[i] = 0.f;
}

static inline void wgmma_gradient(float *d, const uint32_t *, uint32_t walk, int accumulate) {
  backward::multiply_gradient(walk, accumulate);
  for (int i = 0; i < HEAD_DIM / 2; i++)
    d[i] = 1.f;
}
