/* wgmma.h - stands in for the generated matrix products of the forward. */
#define DESCRIPTOR_HIGH 0u

static inline uint32_t address_of(uint32_t descriptor) { return (descriptor & 0x3fff) << 4; }

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
