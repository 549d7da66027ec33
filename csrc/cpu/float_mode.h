/*
 * float_mode.h - the floating-point state in which secrets are computed.
 *
 * Round to nearest, no traps, subnormal numbers read and written as zero: an arithmetic instruction that meets a
 * subnormal takes a microcode assist of some 150 cycles on many CPUs, so that its time would tell. The caller's state
 * comes back afterwards, with its exception flags, which would otherwise say whether anything overflowed or was NaN.
 */
#ifndef DHP_FLOAT_MODE_H
#define DHP_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

typedef struct dhp_float_mode {
  uint32_t control;
} dhp_float_mode;

static inline dhp_float_mode dhp_float_mode_enter(void) {
  const uint32_t traps_masked = 0x1f80, flush_to_zero = 0x8000, denormals_are_zero = 0x0040; /* bits of MXCSR */
  const dhp_float_mode saved = {_mm_getcsr()};
  _mm_setcsr(traps_masked | flush_to_zero | denormals_are_zero);
  return saved;
}

static inline void dhp_float_mode_leave(dhp_float_mode saved) { _mm_setcsr(saved.control); }

#elif defined(__aarch64__)

typedef struct dhp_float_mode {
  uint64_t control, status;
} dhp_float_mode;

static inline dhp_float_mode dhp_float_mode_enter(void) {
  const uint64_t flush_to_zero = 1u << 24; /* FPCR.FZ; all other fields 0: nearest, no traps */
  dhp_float_mode saved;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved.control));
  __asm__ volatile("mrs %0, fpsr" : "=r"(saved.status));
  __asm__ volatile("msr fpcr, %0" : : "r"(flush_to_zero));
  return saved;
}

static inline void dhp_float_mode_leave(dhp_float_mode saved) {
  __asm__ volatile("msr fpcr, %0" : : "r"(saved.control));
  __asm__ volatile("msr fpsr, %0" : : "r"(saved.status));
}

#else
#error "constant time needs subnormals flushed to zero: say here how this architecture does it"
#endif

#endif
