/*
 * ptx.cuh - one small function per PTX instruction, named after it (PTX ISA 9.0, section in each comment).
 *
 * Every function is called by whole warps with warp-uniform operands. Where one thread must act, elect.sync picks it
 * inside the asm statement, and where only one warp must, `go` says so: a C `if` would become a branch, and an indirect
 * branch costs some 100 cycles.
 */
#ifndef DHP_PTX_CUH
#define DHP_PTX_CUH

#include <cuda.h>
#include <stdint.h>

#define DHP_PTX static __device__ __forceinline__

#define FULL_MASK 0xffffffffu /* all lanes of a warp */

/* ---- addresses ------------------------------------------------------------------------------------------------- */

DHP_PTX uint32_t shared_address(const void *pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

/* The warp's index in its CTA, in a form the compiler knows to be the same in all lanes. */
DHP_PTX int warp_index(void) { return __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0); }

/* Whether x is not 0 in any lane: the same in all of them, which the compiler knows. */
DHP_PTX int any_lane(int x) { return __any_sync(FULL_MASK, x); }

/* ---- mbarrier (9.7.13.15) -------------------------------------------------------------------------------------- */

DHP_PTX void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff;\n"
               "@one mbarrier.init.shared::cta.b64 [%0], %1;}" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

/* If go. */
DHP_PTX void mbarrier_init_by(int go, uint32_t barrier, int arrivals) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %2, 0, one;\n"
               "@one mbarrier.init.shared::cta.b64 [%0], %1;}" ::"r"(barrier),
               "r"(arrivals), "r"(go)
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
 * How a phase is named. A barrier knows it by a state of 64 bits, whose high word has the parity of the phase's number
 * in bit 31, and whose low word is not looked at. For PTX a state is opaque, and what an arrival returned; but machine
 * code is what is shipped, and there both forms are one instruction with that word (test_waits.py compiles them). Given
 * a parity, ptxas shifts it there, where registers are scarce anew for every try; given a state it need not. But a
 * shift that waits for a register also delays the tries, and what stands behind them. So a kernel chooses
 * (WAITS_BY_STATE, before this header), as it was measured.
 */
#ifndef WAITS_BY_STATE
#define WAITS_BY_STATE 0
#endif
#if WAITS_BY_STATE
#define PHASE(parity) ((uint32_t)(parity) << 31)
#define MAKE_STATE(phase) ".reg .u32 low; .reg .b64 state; mov.b64 state, {low, " phase "};\n"
#define TRY_OF(phase) "{" MAKE_STATE(phase) "mbarrier.try_wait.shared::cta.b64 there, [%1], state;}\n"
#define FIRST_TRY TRY_OF("%2")
#define TRY TRY_OF("now")
#else
#define PHASE(parity) ((uint32_t)(parity))
#define TRY "mbarrier.try_wait.parity.shared::cta.b64 there, [%1], now;\n"
#define FIRST_TRY "mov.u32 now, %2;\n" TRY
#endif

/*
 * Waits until a barrier has completed a phase, without a loop and without a branch. Returns 1, or 0 if the phase never
 * came; the caller folds that into its output as NaN (fail closed).
 *
 * One try_wait suspends a warp for at most 7,770 cycles on an H100, some 4 us, whatever its time hint says, and tries
 * that do not depend on each other time out together. So each further try must wait for the outcome of the one before:
 * its phase is chosen by it, from two values that are equal (phase and phase ^ zero, where zero is a launch parameter
 * the compiler cannot see through). A predicate instead of the choice would be made into a branch (but see
 * mbarrier_wait), and a sleep costs 65 cycles even if it is one of 0 ns. A try that succeeds at once takes some 25
 * cycles.
 *
 * What the last try says does not count. A warp does not stop at a try: it stops where the outcome is needed, and
 * nothing else needs that of the last one. Reads that follow it would be under way before the tile has come, and the
 * wait would still say that it has. The last one stands there because it needs the outcome of the one before.
 */
#define TRY_AGAIN "selp.u32 now, %2, same, there;\n" TRY
#define DEFINE_WAIT(name, tries)                                                         \
  DHP_PTX uint32_t name(uint32_t barrier, uint32_t phase, uint32_t zero) {               \
    uint32_t done;                                                                       \
    asm volatile("{.reg .pred there; .reg .u32 now, same; xor.b32 same, %2, %3;\n" tries \
                 "selp.u32 %0, 1, 0, there;\n" TRY_AGAIN "}"                             \
                 : "=&r"(done)                                                           \
                 : "r"(barrier), "r"(phase), "r"(zero)                                   \
                 : "memory");                                                            \
    return done;                                                                         \
  }

/*
 * One try after another whose outcome is known, `there`; before the first it is 0. So a wait can be spread over a step:
 * a try takes some 60 cycles, which five in a row add to every step. Again the last one does not count.
 */
#define ONE_TRY(first)                                                                              \
  "{.reg .pred there; .reg .u32 now, same; setp.ne.u32 there, %4, 0; xor.b32 same, %2, %3;\n" first \
  "selp.u32 now, same, %2, there;\n" TRY "selp.u32 %0, 1, 0, there;}"
DHP_PTX uint32_t mbarrier_try(uint32_t barrier, uint32_t phase, uint32_t zero, uint32_t before) {
  uint32_t done;
  asm volatile(ONE_TRY("") : "=r"(done) : "r"(barrier), "r"(phase), "r"(zero), "r"(before) : "memory");
  return done;
}

/*
 * A nap of so many ns, to some twice as many, or of 0 if the phase has come. Nanosleep ends when the clock of the
 * multiprocessor comes to the next multiple of the power of two above its operand, so it may end at once; a second one
 * begins there, and takes all of it. (H100, H200: of 250000 ns one took 0 to 262 us, two 0.26 to 0.52 ms.)
 */
#define SLEEP_IF_NOT(ns) "{.reg .u32 t; selp.u32 t, 0, " ns ", there; nanosleep.u32 t; nanosleep.u32 t;}\n"
#define NAP_NS 250000
enum { NAP = NAP_NS, LONG_NAP = 4 * NAP /* of who may wait for somebody that naps; the longest that there is */ };
DHP_PTX uint32_t mbarrier_nap_and_try(uint32_t barrier, uint32_t phase, uint32_t zero, uint32_t before, uint32_t nap) {
  uint32_t done;
  asm volatile(ONE_TRY(SLEEP_IF_NOT("%5"))
               : "=r"(done)
               : "r"(barrier), "r"(phase), "r"(zero), "r"(before), "r"(nap)
               : "memory");
  return done;
}

/* A phase as a look and the tries behind it take it: made once for all of them. */
#if WAITS_BY_STATE
typedef uint64_t phase_state;
#define STATE_OPERAND "l"
#define LOOK_AT_STATE "mbarrier.test_wait.shared::cta.b64 there, [%1], %2;"
#define TAKE_STATE ""
#define TRY_STATE "mbarrier.try_wait.shared::cta.b64 there, [%1], %2;\n"
DHP_PTX phase_state state_of(uint32_t phase) {
  phase_state state;
  asm volatile("{" MAKE_STATE("%1") "mov.b64 %0, state;}" : "=l"(state) : "r"(phase));
  return state;
}
#else
typedef uint32_t phase_state;
#define STATE_OPERAND "r"
#define LOOK_AT_STATE "mbarrier.test_wait.parity.shared::cta.b64 there, [%1], %2;"
#define TAKE_STATE ".reg .u32 now; mov.u32 now, %2; "
#define TRY_STATE TRY
DHP_PTX phase_state state_of(uint32_t phase) { return phase; }
#endif

/* Whether the phase has come, at once. */
DHP_PTX uint32_t mbarrier_test(uint32_t barrier, phase_state state) {
  uint32_t there;
  asm volatile("{.reg .pred there; " LOOK_AT_STATE " selp.u32 %0, 1, 0, there;}"
               : "=r"(there)
               : "r"(barrier), STATE_OPERAND(state)
               : "memory");
  return there;
}

/*
 * For a wait that ends in a branch: there the warp stops until the outcome is known, and reads nothing before, so the
 * last try counts. Whoever has waited in vain waits again, at length. That takes more instructions, whose number would
 * then depend on how late a tile is; so it has to be rare.
 *
 * Tries of 4 us, each of which is made if the phase was not `there` before. One that is not made takes an issue slot,
 * and is executed: there are as many executed instructions either way, with other threads under a predicate that is
 * true. But a predicate stops the warp until what it comes from is known, of a look or a try some 70 cycles: other work
 * belongs between the two. ptxas keeps the predicate, and makes no branch of it, if each try is a statement of its own.
 */
DHP_PTX uint32_t mbarrier_wait(uint32_t barrier, phase_state state, uint32_t there, int tries) {
#pragma unroll
  for (int i = 0; i < tries; i++)
    asm volatile("{.reg .pred there; " TAKE_STATE "setp.ne.u32 there, %0, 0;\n@!there " TRY_STATE
                 "selp.u32 %0, 1, 0, there;}"
                 : "+r"(there)
                 : "r"(barrier), STATE_OPERAND(state)
                 : "memory");
  return there;
}

/* The look and the tries, one behind the other. */
DHP_PTX uint32_t mbarrier_await(uint32_t barrier, uint32_t phase, int tries) {
  const phase_state state = state_of(phase);
  return mbarrier_wait(barrier, state, mbarrier_test(barrier, state), tries);
}

#define FOUR_TRIES FIRST_TRY TRY_AGAIN TRY_AGAIN TRY_AGAIN /* 16 us */
/* For a CTA's first tiles, when every CTA asks device memory at once, or the launch was preempted, and for what is
 * later than that: then a sleep of up to 1 ms, or of 0 if the phase has come, and one more try. In the forward whoever
 * has waited in vain waits once more, and two sleeps are 1 ms at least. More tries before the sleep would cost every
 * CTA what they take where the phase has come. */
#define SLEEP_AND_TRY "{.reg .u32 ns; selp.u32 ns, 0, 1000000, there; nanosleep.u32 ns;}\n" TRY_AGAIN
DEFINE_WAIT(mbarrier_wait_long, FOUR_TRIES SLEEP_AND_TRY)
/* For what another warp asks for that may be in such a wait itself: longer than that sleeps. */
DEFINE_WAIT(mbarrier_wait_longer, FOUR_TRIES SLEEP_AND_TRY SLEEP_AND_TRY)

/* For streams in which a step has no way out to wait at length: a CTA's first tiles, and those that follow, with a nap
 * that is as short for all that ask for tiles. */
#define IN_QUOTES(x) #x
#define IN_QUOTES_EXPANDED(x) IN_QUOTES(x)
#define NAP_AND_TRY SLEEP_IF_NOT(IN_QUOTES_EXPANDED(NAP_NS)) TRY_AGAIN
DEFINE_WAIT(mbarrier_wait_first, FOUR_TRIES NAP_AND_TRY)
DEFINE_WAIT(mbarrier_wait_steady, FIRST_TRY TRY_AGAIN NAP_AND_TRY)

/* ---- named barriers (9.7.13.1) --------------------------------------------------------------------------------- */

/* If go. All warps that meet there run this same instruction. */
DHP_PTX void bar_sync(int go, int id, int threads) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %2, 0; @go bar.sync %0, %1;}" ::"r"(id), "r"(threads), "r"(go)
               : "memory");
}
/* If go. For warps that come to it at different places of the code: there bar.sync, the aligned form, is undefined. */
DHP_PTX void barrier_sync(int go, int id, int threads) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %2, 0; @go barrier.sync %0, %1;}" ::"r"(id), "r"(threads), "r"(go)
               : "memory");
}
/* If go. */
DHP_PTX void bar_arrive(int go, int id, int threads) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %2, 0; @go bar.arrive %0, %1;}" ::"r"(id), "r"(threads), "r"(go)
               : "memory");
}

/* ---- programmatic dependent launch (9.7.13.13) ----------------------------------------------------------------- */

/* Until the launches that this one depends on have ended and what they wrote can be seen. */
DHP_PTX void await_launches_before(void) { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/* The launches that depend on this one may begin, and wait for its end. */
DHP_PTX void begin_launches_after(void) { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

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

/* The same for a box that is read once: what else is in the L2 cache stays there longer. */
DHP_PTX void tma_load_once(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int d, int s, int h,
                           int b) {
  asm volatile("{.reg .pred one; .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
               "elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %7, 0, one;\n"
               "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%3, %4, %5, %6}], [%2], first;}" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b), "r"(go)
               : "memory");
}

/* If go: one arrival for the calling warp, and the box that it announces: one election for both. */
DHP_PTX void tma_load_announced(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, uint32_t bytes,
                                int d, int s, int h, int b) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %7, 0, one;\n"
               "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%2], %8;\n"
               "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];}" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b), "r"(go), "r"(bytes)
               : "memory");
}

/* If go: the same with two boxes, which begin at columns d and e. */
DHP_PTX void tma_load_two_announced(int go, uint32_t first, uint32_t second, const CUtensorMap *map, uint32_t barrier,
                                    uint32_t bytes, int d, int e, int s, int h, int b) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %7, 0, one;\n"
               "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%2], %8;\n"
               "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];\n"
               "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%9], [%1, {%10, %4, %5, %6}], [%2];}" ::"r"(first),
               "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b), "r"(go), "r"(bytes), "r"(second), "r"(e)
               : "memory");
}

/* If go: box at (x, y) of a map of rank 2. */
DHP_PTX void tma_load_2d(int go, uint32_t destination, const CUtensorMap *map, uint32_t barrier, int x, int y) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %5, 0, one;\n"
               "@one cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4}], [%2];}" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(go)
               : "memory");
}

/* Fetches a tensor map into the cache that TMA reads it from. */
DHP_PTX void tma_prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* ---- bulk sums out of shared memory (9.7.9.25) ------------------------------------------------------------------ */

/* What this thread wrote to shared memory can be read by TMA and wgmma. */
DHP_PTX void fence_async_shared(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* If go: adds integers in shared memory to those in global memory, modulo 2^32. */
DHP_PTX void bulk_add(int go, void *to, uint32_t from, int bytes) {
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; setp.ne.and.s32 one, %3, 0, one;\n"
               "@one cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;}" ::"l"(to),
               "r"(from), "r"(bytes), "r"(go)
               : "memory");
}
DHP_PTX void bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Until all that this thread committed has been read from shared memory. */
DHP_PTX void bulk_wait_read(void) { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/* ---- shared memory (9.7.9.8, 9.7.9.12, 9.7.15.4) ---------------------------------------------------------------- */

/* 8 bytes, at this place of the program: where the compiler may choose, it loads what is used at once. */
DHP_PTX float2 load_shared_two(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

DHP_PTX float load_shared_one(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

DHP_PTX void store_shared_two(uint32_t to, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}
DHP_PTX void store_shared_four(uint32_t to, const int32_t *x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/* If go: 16 bytes of zeros. */
DHP_PTX void clear_shared_four(int go, uint32_t to) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %0, 0; @go st.shared.v4.b32 [%1], {%2, %2, %2, %2};}" ::"r"(go),
               "r"(to), "r"(0)
               : "memory");
}

/* Four 8x8 matrices of 16-bit elements (9.7.9.15): lane 8 m + i has the address of row i of matrix m. */
DHP_PTX void load_matrices(uint32_t *x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

/* The same, each matrix transposed: lane 8 m + i has the address of column i of matrix m. */
DHP_PTX void load_matrices_transposed(uint32_t *x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}
/* Two of them, lanes 0 to 15. */
DHP_PTX void load_two_matrices_transposed(uint32_t *x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(from)
               : "memory");
}

/* Four 8x8 matrices of 16-bit elements, transposed: lane 8 m + i has the address of column i of matrix m. */
DHP_PTX void store_matrices_transposed(uint32_t to, const uint32_t *x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

/* ---- loads (9.7.9.8) of public numbers ----------------------------------------------------------------------------
 */

DHP_PTX int load_word(const int32_t *from) {
  int x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

/* If go: two floats, which are secret; else x stays. */
DHP_PTX void load_two_if(int go, float2 *x, const float *from) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %2, 0; @go ld.global.v2.f32 {%0, %1}, [%3];}"
               : "+f"(x->x), "+f"(x->y)
               : "r"(go), "l"(from)
               : "memory");
}

/* If go: four floats, which are secret; else x stays. */
DHP_PTX void load_four_if(int go, float *x, const float *from) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %4, 0; @go ld.global.v4.f32 {%0, %1, %2, %3}, [%5];}"
               : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
               : "r"(go), "l"(from)
               : "memory");
}

/* If go; else `otherwise`, at once: of a head's sink, which is secret. */
DHP_PTX float load_one_if(int go, const float *from, float otherwise) {
  float x = otherwise;
  asm volatile("{.reg .pred go; setp.ne.s32 go, %1, 0; @go ld.global.f32 %0, [%2];}"
               : "+f"(x)
               : "r"(go), "l"(from)
               : "memory");
  return x;
}

/* If go; else 0, at once. */
DHP_PTX int load_word_if(int go, const int32_t *from) {
  int x;
  asm volatile("{.reg .pred go; setp.ne.s32 go, %2, 0; mov.b32 %0, 0; @go ld.global.b32 %0, [%1];}"
               : "=&r"(x)
               : "l"(from), "r"(go)
               : "memory");
  return x;
}

/* ---- clusters (9.7.9.23, 9.7.9.12, 9.7.13.4) --------------------------------------------------------------------- */

/* Where an address of this CTA's shared memory is in that of the CTA of this rank. */
DHP_PTX uint32_t address_in_cta(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/* Into the shared memory of any CTA of the cluster; completes 4 bytes on an mbarrier there (9.7.9.13). By all lanes: on
 * a condition ptxas makes a branch of it. */
DHP_PTX void store_async_one(uint32_t to, uint32_t barrier, float x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(to), "r"(barrier),
               "f"(x)
               : "memory");
}

/* What lies in this CTA's shared memory, into that of any CTA of the cluster, as TMA copies; completes as many bytes on
 * an mbarrier there (9.7.9.25). Multiples of 16. */
DHP_PTX void copy_async(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "{.reg .pred one; elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/* All threads of a cluster meet at a barrier in hardware. What they stored before need not be seen after it: a release
 * would wait until all stores of the thread have ended. */
DHP_PTX void cluster_arrive(void) { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DHP_PTX void cluster_wait(void) { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* ---- stores (9.7.9.12): a C `if` could become a branch -------------------------------------------------------- */

/* If go. */
DHP_PTX void store_one(int go, float *to, float x) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %0, 0; @go st.global.f32 [%1], %2;}" ::"r"(go), "l"(to), "f"(x)
               : "memory");
}

/* If go: two floats, 8-byte aligned. */
DHP_PTX void store_two(int go, float *to, float x, float y) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %0, 0; @go st.global.v2.f32 [%1], {%2, %3};}" ::"r"(go), "l"(to),
               "f"(x), "f"(y)
               : "memory");
}

/* If go: the low byte. */
DHP_PTX void store_byte(int go, uint8_t *to, uint32_t x) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %0, 0; @go st.global.u8 [%1], %2;}" ::"r"(go), "l"(to), "r"(x)
               : "memory");
}

/* If go. */
DHP_PTX void store_word(int go, uint32_t *to, uint32_t x) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %0, 0; @go st.global.u32 [%1], %2;}" ::"r"(go), "l"(to), "r"(x)
               : "memory");
}

/* If go: 16 bytes. */
DHP_PTX void store_four(int go, void *to, const uint32_t *x) {
  asm volatile("{.reg .pred go; setp.ne.s32 go, %0, 0; @go st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(go),
               "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/* Sets bits of a word, whoever else does at the same time (9.7.13.6). On no condition: ptxas makes a branch of one. */
DHP_PTX void or_into(void *to, uint32_t bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

/* For the end of a kernel whose last instruction is such a store: else ptxas makes its predicate that of an exit. */
DHP_PTX void end_together(void) { __syncthreads(); }

/* ---- wgmma (9.7.15); the products themselves are generated into wgmma.h ---------------------------------------- */

DHP_PTX void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DHP_PTX void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most `pending` of the committed groups are unfinished; a macro because it must be an immediate. */
#define wgmma_wait(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/*
 * Low half of a shared memory matrix descriptor (9.7.15.5.1.2): address, and `leading` bytes from one 64-column box to
 * the next. Bytes are counted in units of 16, so a descriptor moves by n bytes by adding n / 16. The high half is a
 * constant of wgmma.py. Half a descriptor takes half the uniform registers, which are scarce: if they run out, ptxas
 * keeps none of the loop's variables in them, and the loop becomes 5 % slower.
 */
DHP_PTX uint32_t matrix_descriptor(uint32_t address, uint32_t leading) {
  return (address & 0x3ffffu) >> 4 | (leading >> 4) << 16;
}
/* Of an address below 2^18, as those of a CTA's shared memory are. */
DHP_PTX uint32_t matrix_descriptor_unmasked(uint32_t address, uint32_t leading) {
  return address / 16 + (leading >> 4 << 16);
}

/* ---- mma (9.7.15.5.8) ------------------------------------------------------------------------------------------- */

/*
 * d += a b of 16 rows, 16 summed and 8 columns, of which rows 8 to 15 are zeros: a thread has two registers of a and of
 * b, for the first and the last 8 summed. d as wgmma's: two columns of row lane / 4, and two of a row of zeros. The
 * sums have the bits that wgmma gives for 16 summed.
 */
DHP_PTX void multiply_eight_rows(float *d, const uint32_t *a, const uint32_t *b) {
#if ELEMENT_IS_BFLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(0), "r"(a[1]), "r"(b[0]), "r"(b[1]));
#undef MMA
}

/* ---- arithmetic ------------------------------------------------------------------------------------------------ */
/* Exponential, logarithm and reciprocal without a slow path are shared with the CPU kernel: ../ct.h. */

/* 1 if a > b, else 0: FSET, without a predicate (9.7.4). */
DHP_PTX float greater(float a, float b) {
  float one_or_zero;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(one_or_zero) : "f"(a), "f"(b));
  return one_or_zero;
}

/* The larger one; NaN if one is NaN (9.7.3.12). */
DHP_PTX float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

/* Of each two halves the larger one, as integers (9.7.1.13). */
DHP_PTX uint32_t larger_halves(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
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

/* The other way; exact (9.7.9.21). A bfloat16 is the upper half of a float32. */
DHP_PTX void unpack_two(float *low, float *high, uint32_t pair) {
#if ELEMENT_IS_BFLOAT16
  *low = __uint_as_float(pair << 16);
  *high = __uint_as_float(pair & 0xffff0000u);
#else
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(*low), "=f"(*high)
      : "r"(pair));
#endif
}

#endif
