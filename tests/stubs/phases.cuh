/*
 * phases.cuh - phases as csrc/hopper/ptx.cuh has them, for every stub of it: a phase is its parity in another bit, and
 * a state another type, so that nobody takes one for the other. Before this header: require, the machine's.
 */
#ifndef STUBS_PHASES_CUH
#define STUBS_PHASES_CUH

#define PHASE(parity) ((uint32_t)(parity) << 31)
struct phase_state {
  uint32_t phase;
};
static inline phase_state state_of(uint32_t phase) { return {phase}; }
static inline uint32_t parity_of(uint32_t phase) {
  require((phase & 0x7fffffffu) == 0, "a phase that is none");
  return phase >> 31;
}
static inline uint32_t parity_of(phase_state state) { return parity_of(state.phase); }

#endif
