/*
 * common_ptx.cuh - those functions of ptx.cuh that every stub of it makes of its own tma_load,
 * mbarrier_arrive_expect_tx, mbarrier_test and mbarrier_wait, or of nothing. After these.
 */
#ifndef STUBS_COMMON_PTX_CUH
#define STUBS_COMMON_PTX_CUH

static inline uint32_t mbarrier_await(uint32_t barrier, uint32_t phase, int tries) {
  const phase_state state = state_of(phase);
  return mbarrier_wait(barrier, state, mbarrier_test(barrier, state), tries);
}

static inline void tma_load_announced(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier,
                                      uint32_t bytes, int d, int s, int h, int b) {
  mbarrier_arrive_expect_tx(go, barrier, bytes);
  tma_load(go, destination, map, barrier, d, s, h, b);
}
static inline void tma_load_two_announced(int go, uint32_t first, uint32_t second, const CUtensorMap *map,
                                          uint32_t barrier, uint32_t bytes, int d, int e, int s, int h, int b) {
  tma_load_announced(go, first, map, barrier, bytes, d, s, h, b);
  tma_load(go, second, map, barrier, e, s, h, b);
}
static inline void tma_load_once(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int d, int s,
                                 int h, int b) {
  tma_load(go, destination, map, barrier, d, s, h, b);
}
static inline void tma_prefetch_map(const CUtensorMap *) {}

static inline void fence_mbarrier_init() {}
static inline void begin_launches_after() {}

static inline void wgmma_fence() {}
static inline uint32_t matrix_descriptor(uint32_t address, uint32_t leading) {
  return (address & 0x3ffffu) >> 4 | (leading >> 4) << 16;
}
static inline uint32_t matrix_descriptor_unmasked(uint32_t address, uint32_t leading) {
  return address / 16 + (leading >> 4 << 16);
}

static inline float greater(float a, float b) { return a > b ? 1.f : 0.f; }

#endif
