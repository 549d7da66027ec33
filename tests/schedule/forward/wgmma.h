/*
 * wgmma.h - stands in for the generated matrix products: the simulator learns which tiles a product reads, and says
 * what its results are.
 */
#define DESCRIPTOR_HIGH 0u

#if Q_IN_REGISTERS
static inline void wgmma_scores(float *s, const uint32_t *q, uint32_t k, int accumulate, uint32_t) {
  forward::multiply_held(q, k, accumulate);
#else
static inline void wgmma_scores(float *s, uint32_t q, uint32_t k, int accumulate, uint32_t) {
  forward::multiply_scores(q, k, accumulate);
#endif
  forward::set_scores(s);
}

static inline void wgmma_output(float *o, const uint32_t *p, uint32_t v, int accumulate, uint32_t) {
  forward::multiply_output(v, accumulate);
  forward::set_output(o, p, accumulate);
}
