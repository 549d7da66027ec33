/*
 * wgmma.h - stands in for the generated matrix products: the simulator learns which tiles a product reads, and where
 * its results go.
 */
static inline void wgmma_scores(float *s, uint32_t own, uint32_t walk, int accumulate) {
  backward::multiply_scores(s, own, walk, accumulate);
}
static inline void wgmma_scores_fresh(float *s, uint32_t own, uint32_t walk, int) {
  backward::multiply_scores(s, own, walk, 0);
}

static inline void wgmma_gradient(float *d, const uint32_t *scores, uint32_t walk, int accumulate) {
  backward::multiply_gradient(d, scores, walk, accumulate);
}

static inline void wgmma_dq(float *dq, uint32_t ds, uint32_t k, int accumulate) {
  backward::multiply_dq(dq, ds, k, accumulate);
}
static inline void wgmma_dq_fresh(float *dq, uint32_t ds, uint32_t k, int) { backward::multiply_dq(dq, ds, k, 0); }
