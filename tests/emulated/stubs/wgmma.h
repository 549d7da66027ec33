/* wgmma.h - stands in for the generated matrix products, of the forward and of the backward. */
#define DESCRIPTOR_HIGH 0u

static inline uint32_t address_of(uint32_t descriptor) { return (descriptor & 0x3fff) << 4; }

#if OF_BACKWARD

/* Eight rows behind eight others, wherever they lie. */
static inline void multiply_shared(float *d, uint32_t a, uint32_t b, bool is_transposed, int columns, bool accumulate) {
  emulated::multiply(d, {nullptr, address_of(a), 1024}, address_of(b), (b >> 16) << 4, is_transposed, columns,
                     accumulate);
}

static inline void wgmma_scores_fresh(float *s, uint32_t own, uint32_t walk, int) {
  multiply_shared(s, own, walk, false, TILE_K, false);
}
static inline void wgmma_scores(float *s, uint32_t own, uint32_t walk, int accumulate) {
  multiply_shared(s, own, walk, false, TILE_K, accumulate != 0);
}
static inline void wgmma_dq_fresh(float *dq, uint32_t ds, uint32_t k, int) {
  multiply_shared(dq, ds, k, true, 64, false);
}
static inline void wgmma_dq(float *dq, uint32_t ds, uint32_t k, int accumulate) {
  multiply_shared(dq, ds, k, true, 64, accumulate != 0);
}
static inline void wgmma_gradient(float *d, const uint32_t *p, uint32_t walk, int accumulate) {
  emulated::multiply(d, {p, 0, 0}, address_of(walk), (walk >> 16) << 4, true, HEAD_DIM, accumulate != 0);
}

#else

#if Q_IN_REGISTERS
static inline void wgmma_scores(float *s, const uint32_t *q, uint32_t k, int accumulate, uint32_t) {
  const emulated::Operand a = {q, 0, 0};
#else
static inline void wgmma_scores(float *s, uint32_t q, uint32_t k, int accumulate, uint32_t) {
  const emulated::Operand a = {nullptr, address_of(q), 1024 * ROWS / 64}; /* family.py says why */
#endif
  emulated::multiply(s, a, address_of(k), 0, false, TILE_K, accumulate != 0);
}

static inline void wgmma_output(float *o, const uint32_t *p, uint32_t v, int accumulate, uint32_t) {
  emulated::multiply(o, {p, 0, 0}, address_of(v), (v >> 16) << 4, true, HEAD_DIM, accumulate != 0);
}

#endif
