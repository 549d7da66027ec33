/*
 * ptx.cuh - one small function per PTX instruction, named after it (PTX ISA 9.0, section in each comment).
 *
 * Every function is called by whole warps with warp-uniform operands. Where one thread must act, elect.sync picks it
 * inside the asm statement, and where only one warp must, `go` says so: a C `if` would become a branch, and an indirect
 * branch costs some 100 cycles.
 */
#ifndef DHP_PTX_CUH
#define DHP_PTX_CUH

#include <stdint.h>

#define DHP_PTX static __device__ __forceinline__

/* ---- addresses ------------------------------------------------------------------------------------------------- */

DHP_PTX uint32_t shared_address(const void *pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

/* The warp's index in its CTA, in a form the compiler knows to be the same in all lanes. */
DHP_PTX int warp_index(void) { return __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0); }

/* ---- mbarrier (9.7.13.15) -------------------------------------------------------------------------------------- */

DHP_PTX void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff;\n"
               "@one mbarrier.init.shared::cta.b64 [%0], %1;}" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

DHP_PTX void fence_mbarrier_init(void) { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* If go: one arrival for the calling warp, and the number of bytes that TMA will deliver in this phase. */
DHP_PTX void mbarrier_arrive_expect_tx(int go, uint32_t barrier, uint32_t bytes) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %2, 0, one;\n"
               "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;}" ::"r"(barrier),
               "r"(bytes), "r"(go)
               : "memory");
}

/*
 * Waits until two barriers have completed the phases of these parities, without a loop and without a branch. Returns 1,
 * or 0 if a phase never came; the caller folds that into its output as NaN (fail closed).
 *
 * One try_wait suspends a warp for at most 7,770 cycles on an H100, whatever its time hint says, and several at once
 * time out together. So each further try must wait for the outcome of the one before: its parity is chosen by it, from
 * two values that are equal (parity and parity ^ zero, where zero is a launch parameter the compiler cannot see
 * through). A predicate instead of the choice would be made into a branch. After the last try in a row comes one sleep
 * of 1 to 2 ms, or of 0 if both are there, for launches that were preempted; then the last try.
 */
#define TRY_BOTH                                                          \
  "mbarrier.try_wait.parity.shared::cta.b64 first, [%1], first_parity;\n" \
  "mbarrier.try_wait.parity.shared::cta.b64 second, [%3], second_parity;\n"
#define TRY_BOTH_AGAIN                              \
  "selp.u32 first_parity, %2, first_same, first;\n" \
  "selp.u32 second_parity, %4, second_same, second;\n" TRY_BOTH
#define DEFINE_WAIT_BOTH(name, tries)                                                                                 \
  DHP_PTX uint32_t name(uint32_t first, uint32_t first_parity, uint32_t second, uint32_t second_parity,               \
                        uint32_t zero) {                                                                              \
    uint32_t done;                                                                                                    \
    asm volatile(                                                                                                     \
        "{.reg .pred first, second, both;\n"                                                                          \
        ".reg .u32 first_parity, first_same, second_parity, second_same, sleep_ns;\n"                                 \
        "mov.u32 first_parity, %2; xor.b32 first_same, %2, %5;\n"                                                     \
        "mov.u32 second_parity, %4; xor.b32 second_same, %4, %5;\n" tries                                             \
        "and.pred both, first, second; selp.u32 sleep_ns, 0, 1000000, both; nanosleep.u32 sleep_ns;\n" TRY_BOTH_AGAIN \
        "and.pred both, first, second; selp.u32 %0, 1, 0, both;}"                                                     \
        : "=r"(done)                                                                                                  \
        : "r"(first), "r"(first_parity), "r"(second), "r"(second_parity), "r"(zero)                                   \
        : "memory");                                                                                                  \
    return done;                                                                                                      \
  }

/* In the main loop: 12 us, then the sleep. Takes some 150 cycles when both are there. */
DEFINE_WAIT_BOTH(mbarrier_wait_both, TRY_BOTH TRY_BOTH_AGAIN TRY_BOTH_AGAIN)
/* For a CTA's first loads, when every CTA asks device memory at once: 24 us, then the sleep. */
DEFINE_WAIT_BOTH(mbarrier_wait_both_first,
                 TRY_BOTH TRY_BOTH_AGAIN TRY_BOTH_AGAIN TRY_BOTH_AGAIN TRY_BOTH_AGAIN TRY_BOTH_AGAIN)

/* ---- named barriers (9.7.13.1) --------------------------------------------------------------------------------- */

DHP_PTX void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DHP_PTX void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/* ---- TMA (9.7.9.27) -------------------------------------------------------------------------------------------- */

/* If go: box at (d, s, h, b) of a [B, H, S, D] tensor map into shared memory; completes bytes on the barrier. */
DHP_PTX void tma_load(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int d, int s, int h,
                      int b) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %7, 0, one;\n"
               "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];}" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b), "r"(go)
               : "memory");
}

/* Box from shared memory to (d, s, h, b); elements outside the tensor are not written. */
DHP_PTX void tma_store(const CUtensorMap *map, uint32_t source, int d, int s, int h, int b) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff;\n"
               "@one cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
               " [%0, {%2, %3, %4, %5}], [%1];}" ::"l"(map),
               "r"(source), "r"(d), "r"(s), "r"(h), "r"(b)
               : "memory");
}

/* Waits until the stores of this thread have read shared memory, which must live that long; the kernel's end waits for
 * their writes. */
DHP_PTX void tma_store_wait(void) {
  asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Fetches a tensor map into the cache that TMA reads it from. */
DHP_PTX void tma_prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Makes ordinary shared memory writes visible to TMA and wgmma (9.7.13.4). */
DHP_PTX void fence_proxy_async(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- wgmma (9.7.15); the products themselves are generated into wgmma.h ---------------------------------------- */

DHP_PTX void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DHP_PTX void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most `pending` of the committed groups are unfinished; a macro because it must be an immediate. */
#define wgmma_wait(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/*
 * Shared memory matrix descriptor (9.7.15.5.1.2): 128-byte swizzle (1 << 62), 8 rows of 128 bytes from one group of
 * rows to the next (stride 1024), `leading` bytes from one 64-column box to the next. Bytes are counted in units of 16,
 * so a descriptor moves by n bytes by adding n / 16.
 */
DHP_PTX uint64_t matrix_descriptor(uint32_t address, uint32_t leading) {
  return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         1ull << 62;
}

/* ---- arithmetic ------------------------------------------------------------------------------------------------ */
/* Exponential, logarithm and reciprocal without a slow path are shared with the CPU kernel: ../ct.h. */

/* 1 if a > b, else 0: FSET, without a predicate (9.7.4). */
DHP_PTX float greater(float a, float b) {
  float one_or_zero;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(one_or_zero) : "f"(a), "f"(b));
  return one_or_zero;
}

/* Two floats to one register of two 16-bit elements, the first in the low half, round to nearest even (9.7.9.21). */
DHP_PTX uint32_t pack_two(float low, float high) {
  uint32_t pair;
#if ELEMENT_IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

/* Four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8 (9.7.9).
 */
DHP_PTX void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

#endif
