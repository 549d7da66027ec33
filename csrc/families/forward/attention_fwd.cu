/*
 * attention_fwd.cu - FlashAttention forward for Hopper: out = softmax(scale q k^T) v. A CTA stays on its multiprocessor
 * and computes one query tile after another, for each going over the keys that the tile sees.
 *
 * Path of the data: q, k, v tiles come in by TMA (128-byte swizzle), S = q k^T by wgmma from shared memory, softmax in
 * registers, P packed in registers, O += P v by wgmma, O from registers to global memory.
 *
 * WARPGROUPS warpgroups of ROWS query rows share every k and v tile and take turns at the tensor cores. In step t each
 * warpgroup issues
 *
 *     S(t) = q k(t)^T, then O += P(t-1) v(t-1), back to back,
 *
 * hands the turn over, and computes the softmax of S(t) while the tensor cores work for the other warpgroups. The turns
 * are named barriers. With one warpgroup there is no turn to hand over; if CTAS_PER_SM is not 1, others on the
 * multiprocessor fill the gaps.
 *
 * If OWN_TILES, a warpgroup whose rows do not see the last key tile of the query tile gives its turns on until it comes
 * to one that they see. If LEAVES_EARLY, one whose rows have come to their window's first key tile stores them, and
 * gives its turns on until the query tile ends. If HALF_TILES, the softmax of a key tile of which a warpgroup's rows
 * see one half only, which is its last one or its first one, is over that half.
 *
 * After the last key tile there is P v left: if SEAMLESS, S(0) of the next query tile follows it in one step, and O is
 * stored while S(0) is computed. Else the last step is P v alone, and step 0 S(0).
 *
 * Keys are in segments of SEGMENT_TILES key tiles, counted from key 0. Of each a row is a chain of its own, and a row
 * of several is a fold over them, from the last to the first (fold.cuh). What it is so far lies in device memory
 * (parts.cuh): for this CTA, which goes on with the next segment, or for the fold family, if segments are split.
 *
 * When the last warpgroup has the turn of step t, all have finished step t-1: the stage of that step's pair is free,
 * and the loaders, warps of the last warpgroup, ask TMA for the pair that comes there STAGES steps after that one, in
 * the next query tile if this one ends before. So the stream of tiles never stops, and asking costs no time: it comes
 * after the products of the step have been issued. With two stages that would be too late: there the warpgroups tell
 * the last one in the middle of a softmax that they have finished the step, and it asks at once.
 *
 * Keys are visited from the last visible tile down to tile 0, in tiles of TILE_K counted from key 0, so the tiles that
 * need a mask come first, and the order of every sum is fixed by the keys alone: a row's bits do not depend on its
 * neighbours, its batch, its head, whether it is computed in a prefill or alone, or whether its segments are split. A
 * masked score adds exactly 0.
 *
 * CT: q, k and v only ever meet wgmma, fused multiply-adds, multiplications, additions, selects and masks by public
 * positions, max, ex2, rcp, lg2, conversions and quad shuffles with constant lanes. Every branch, address, barrier and
 * predicate is a function of the block index and the launch parameters, or of whether a tile has arrived. A wait is a
 * fixed sequence of suspending tries, and a longer one if they were in vain; a warp for which that was in vain, too,
 * makes all its rows NaN from then on. What soft caps and sinks add is in forms.cuh.
 */
#include <cuda.h>

#include "layout.cuh"
#include "loads.cuh"
#include "wgmma.h"
/* These use the constants and products above. */
#include "../../hopper/products.cuh"
#include "../../hopper/rows_out.cuh"
#include "../../hopper/softmax.cuh"
#include "parts.cuh"
#if FORM
#include "forms.cuh"
#endif

/* ---- forms of the kernel --------------------------------------------------------------------------------------- */

/*
 * LISTED: query tiles stand in a list in device memory. Rows end with their sequence, a window hides keys on two sides,
 * and behind the last key lie other sequences' keys. These are masked, but 0 times a NaN among their v would be NaN: in
 * the last key tile of a sequence their rows of v are cleared. Otherwise TMA reads zeros there. A list says itself
 * whether its rows have segments.
 *
 * ONE_SEGMENT, without a list: rows have one, and nothing goes on to another.
 *
 * WINDOWED, of one segment: a window hides keys on two sides, too, of a call without a list.
 */
#if LISTED
#define MORE_PARAMETERS , const __grid_constant__ dhp_fwd_list list
#define FIRST_QUERY_TILE() nth_query_tile(&p, &list, word_of_lane(&list, 0, 0), 0, -1)
#define NTH_QUERY_TILE(nth, from) nth_query_tile(&p, &list, now.word, nth, from)
#define NEXT_SEGMENT() next_segment(&now)
#define HEAD_OF(tile) head_of(&p, &(tile))
#define RESUMES() resumes(&now)
#define IS_SPLIT 0
#define ROW_OF_THREAD(tile, first, r) row_of_thread(&p, &tile, group, first, r)
#define BATCH_OF(tile) 0
#define FIRST_ROW(tile) OF_ENTRY(&(tile), row)
#define IS_BAD(tile) OF_ENTRY(&(tile), is_bad)
#define MASKED_STEPS() masked_steps(&now)
#define PLAIN_STEPS_END() plain_end(&now)
#define ROW_END(tile) OF_ENTRY(&(tile), row_end)
#define OWN_STEPS() now.key_tiles
#define BEGINS_WITH_HALF() 0
#define ENDS_WITH_HALF() 0
#else
#if WINDOWED
#define MORE_PARAMETERS , const __grid_constant__ dhp_fwd_window window
#define LOWEST window.lowest
#else
#define MORE_PARAMETERS
#define LOWEST 0 /* nobody looks at it */
#endif
#define FIRST_QUERY_TILE() NTH_QUERY_TILE(0, -1)
#define NTH_QUERY_TILE(nth, from) nth_query_tile(&p, nth, from, group, LOWEST)
#define NEXT_SEGMENT() (ONE_SEGMENT ? -1 : next_segment(&p, &now))
#define HEAD_OF(tile) (tile).head
#define RESUMES() (ONE_SEGMENT ? 0 : resumes(&p, &now))
#define IS_SPLIT (!ONE_SEGMENT && p.splits > 1)
#define ROW_OF_THREAD(tile, first, r) row_of_thread(&p, &tile, group, first, r, LOWEST)
#define BATCH_OF(tile) (tile).batch
#define FIRST_ROW(tile) (tile).row
#define IS_BAD(tile) 0
#define MASKED_STEPS() masked_steps(&p, &now, group)
#define PLAIN_STEPS_END() plain_end(&p, &now, group, LOWEST)
#define OWN_STEPS() own_steps(&p, &now, group, LOWEST)
#define BEGINS_WITH_HALF() begins_with_half(&p, &now, group)
#define ENDS_WITH_HALF() ends_with_half(&p, &now, group, LOWEST)
#define ROW_END(tile) p.seqlen_q
#endif

#define HAS_FIRST_KEYS (LISTED || WINDOWED)            /* of rows */
#define FIRST_KEY(step) ((now.last - (step)) * TILE_K) /* of the key tile that is visited in a step */

/*
 * FORM: a soft cap, or sinks, of kernels with a list. A sink is a term of a row's sum from the beginning on, so a key
 * tile of which the row sees nothing must leave it as it is, on either side of what it sees.
 */
#if FORM
#define FORM_PARAMETER , const __grid_constant__ dhp_fwd_forms forms
#define SEES_LAST_KEY(r) ((row[r].last_key >= FIRST_KEY(now.key_tiles - 1)) & (row[r].last_key < FIRST_KEY(-1)))
#define BEGIN_SUMS(r) begin_with_sink(&stats, r, SEES_LAST_KEY(r), &p, &forms, HEAD_OF(now) + row[r].head, lane)
#define CAP_SCORES()                                     \
  do {                                                   \
    if (FORM == DHP_FORM_SOFTCAP) cap_scores(s, &forms); \
  } while (0)
#define SEES_NONE_OF(r, step) \
  ((first_column[r] >= TILE_K - lane % 4 * 2) | (limit[r] < -(lane % 4 * 2))) /* both from this lane's column on */
#define LSE_OF_NONE(of, x) lse_of_none(&forms, HEAD_OF(of) + x.head, OF_ENTRY(&(of), is_of_none))
#else
#define FORM_PARAMETER
#define BEGIN_SUMS(r)                      \
  do {                                     \
    stats.shift[r] = -p.highest_score;     \
    stats.sum[r] = stats.rescale[r] = 0.f; \
  } while (0)
#define CAP_SCORES()
#define SEES_NONE_OF(r, step) (row[r].first_key >= FIRST_KEY(step) + TILE_K)
#define LSE_OF_NONE(of, x) -INFINITY
#endif

/* What was measured to gain in one kernel is a loss in another (docs/kernel-measured.md), so such choices are made by
 * kernel. Many are for kernels of several warpgroups without a list or window, by head_dim, and at 128 and 256 by
 * whether they are for rows of one segment (short) or of any number of segments (long). */
#define PLAIN (WARPGROUPS > 1 && !LISTED && !WINDOWED)
#define PLAIN_64 (PLAIN && HEAD_DIM == 64)
#define PLAIN_SHORT_128 (PLAIN && HEAD_DIM == 128 && ONE_SEGMENT)
#define PLAIN_LONG_128 (PLAIN && HEAD_DIM == 128 && !ONE_SEGMENT)
#define PLAIN_SHORT_256 (PLAIN && HEAD_DIM == 256 && ONE_SEGMENT)
#define WINDOW_128 (WARPGROUPS > 1 && WINDOWED && HEAD_DIM == 128)
#define WINDOW_256 (WARPGROUPS > 1 && WINDOWED && HEAD_DIM == 256)

/* Fewer instructions for descriptors, and fewer registers: none is masked but q's at head_dim 256, which is computed
 * again in each step, and v's is k's and a constant. Where it was measured to gain. */
#define LEAN_DESCRIPTORS                                                     \
  (HEAD_DIM == 64    ? ONE_SEGMENT || WARPGROUPS > 1                         \
   : HEAD_DIM == 128 ? PLAIN_LONG_128 || (WARPGROUPS > 1 && LISTED && !FORM) \
                     : WARPGROUPS > 1)
#define DESCRIPTOR(address, leading) \
  (LEAN_DESCRIPTORS ? matrix_descriptor_unmasked(address, leading) : matrix_descriptor(address, leading))

/* ---- the kernel ------------------------------------------------------------------------------------------------ */

extern "C" __global__ void __launch_bounds__(CTA_THREADS, CTAS_PER_SM)
dhp_attention_fwd(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ dhp_fwd_params p MORE_PARAMETERS FORM_PARAMETER) {
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + DHP_SHARED_ALIGN - 1) & ~(uint32_t)(DHP_SHARED_ALIGN - 1);
  const int warp = warp_index();
  const int group = warp / WARPS_PER_GROUP, lane = (int)threadIdx.x % 32;
  const uint32_t pairs_full = base + SHARED_BARRIERS + PAIR_FULL;
  const uint32_t q_full = base + SHARED_BARRIERS + Q_FULL + 8 * group;
  const uint32_t q_rows = base + SHARED_Q + group * Q_BYTES; /* in the first place */
#if Q_IN_REGISTERS
  uint32_t q[HEAD_DIM / 4]; /* as the A operand of S: four registers for 16 columns */
#else
  const uint32_t q_descriptor = DESCRIPTOR(q_rows, 16); /* leading bytes unused: K-major, one box a product */
#endif
  const uint32_t k_descriptor = DESCRIPTOR(base + SHARED_K, 16);
  const uint32_t v_descriptor = matrix_descriptor(base + SHARED_V, KV_BOX_BYTES);
  const int is_last_group = group == WARPGROUPS - 1, next_turn = TURN + (group + 1) % WARPGROUPS;

  /* Barriers, while the tensor maps are fetched. */
  if (warp == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
#pragma unroll
    for (int i = 0; i < BARRIER_BYTES / 8; i++)
      mbarrier_init(base + SHARED_BARRIERS + 8 * i, i < WARPGROUPS ? 1 : 2 * LOADERS);
    fence_mbarrier_init();
  }
  __syncthreads();

  /* First loads: q, and this query tile's pairs for as many stages as there are; there is no v before the first. */
  int nth = 0;
  if (LISTED) await_launches_before(); /* the list is theirs */
  query_tile now = FIRST_QUERY_TILE();
  if (LISTED && now.key_tiles == 0) return;
#if !LISTED
  const
#endif
      loader load = loader_of(warp, &k_map, &v_map, base);
#if LISTED
  load.list = &list;
  load.lane = lane;
  load.finds_places = 1;
#endif
  const int loads_q = warp % WARPS_PER_GROUP == 0;
  if (!LISTED) await_launches_before();
  begin_launches_after();
  load_queries(loads_q, &q_map, q_rows, q_full, FIRST_ROW(now) + (group << p.log2_rows), HEAD_OF(now), BATCH_OF(now));
#pragma unroll
  for (int u = 0; u < STAGES; u++)
    load_pair(u >= load.loads_v && u - load.loads_v < now.key_tiles, &load, pairs_full, u, u, &now, &now);
  mbarrier_arrive_expect_tx(load.active && load.loads_v, pairs_full, 0);
#if LISTED
  load.finds_places = load.active;
#endif

/*
 * A tile may be later than a step can wait for, because others load more than there is time for. Then this warp leaves
 * the loops over steps, by a step that there is not, awaits the tile at length, and goes on with them: a longer wait
 * would cost every step what its tries take where the tile is there. `arrived` is LATE while every tile has come, and
 * then 0: who has given up does not wait at length again.
 */
#define LATE (1 << 29) /* more than there are steps; two of them may be added to one */
#define LATE_UNLESS(here) (any_lane(!(here)) ? arrived : 0)
#define AWAIT_LATE(came)                       \
  do {                                         \
    arrived = any_lane(!(came)) ? 0 : arrived; \
    t &= LATE - 1;                             \
  } while (0)

/* Where q of a phase lies, in bytes from q_rows: if there are two places, in turn. */
#define Q_PLACE(parity) (Q_PLACES > 1 ? (parity) * WARPGROUPS * Q_BYTES : 0)
/* The next query tile's q is asked for while this one is computed: into the other place, or, if SEAMLESS, into the one
 * that this tile's q has been taken out of. */
#define ASKS_AHEAD (SEAMLESS || Q_PLACES > 1)

/* Tries of a wait in the stream of tiles: 12, 16 or 24 us. At 128 with one segment a fourth costs 1 %; at 256 tiles
 * were later than 12 us where the profiler's own code fills the memory. */
#define TRIES (HEAD_DIM == 256 ? 6 : PLAIN_SHORT_128 ? 3 : 4)

/* q's next phase if it is asked for, else the one before, which has ended. */
#define PHASE_OF_QUERIES(asked) PHASE(q_parity ^ !(asked))
#define LATE_QUERIES(asked) LATE_UNLESS(mbarrier_await(q_full, PHASE_OF_QUERIES(asked), TRIES))
#define AWAIT_LATE_QUERIES(asked) AWAIT_LATE(mbarrier_wait_long(q_full, PHASE_OF_QUERIES(asked), p.zero))
#define PAIR_BARRIER (pairs_full + 8 * pair.index) /* of the pair of the next step */
#define AWAIT_LATE_PAIR() AWAIT_LATE(mbarrier_wait_longer(PAIR_BARRIER, pair.phase, p.zero))

  float o[OUTPUTS], s[SCORES];
  uint32_t probabilities[SCORES / 2];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    o[i] = 0.f;
  stage pair = {0, 0};   /* that the next step needs */
  uint32_t q_parity = 0; /* of q's next phase */
  int arrived =
      any_lane(!(mbarrier_wait_long(q_full, PHASE(0), p.zero) & mbarrier_wait_long(pairs_full, PHASE(0), p.zero)))
          ? 0
          : LATE;
  give_turn(is_last_group, TURN); /* the first warpgroup's first turn */

  /*
   * The parts of a step. Macros, because functions over a struct of these variables cost the loop uniform registers:
   * nvcc orders its loads otherwise. They read p, group, is_last_group, next_turn, load, pairs_full, the descriptors,
   * lane, now, next and row; pair, t, arrived, s, o, probabilities and stats change. Below, those between two query
   * tiles.
   */

/* With two stages, asking after the next step's products would be too late: they ask in the middle of the softmax. */
#define ASKS_EARLY (WARPGROUPS > 1 && STAGES == 2)

/* Into the stage of step `done`, for STAGES steps later: of this query tile, or of the next one. */
#define LOAD_ANY(done) load_pair(arrived, &load, pairs_full, index_before(pair.index), (done) + STAGES, &now, &next)

/* This warpgroup's steps, but for one over a last half. */
#define WHOLE_STEPS() (OWN_STEPS() - ENDS_WITH_HALF())

/* The steps that need no mask; without a list only those that ask for this query tile's own pairs. */
#if !HAS_FIRST_KEYS
#define HAS_PLAIN_STEPS (!ASKS_EARLY)
#define READ_PLAIN_END()
#define PLAIN_END (now.key_tiles - STAGES)
#define LOAD_PLAIN(done) load_own_pair(arrived, &load, pairs_full, index_before(pair.index), (done) + STAGES, &now)
#else
#define HAS_PLAIN_STEPS 1
#define READ_PLAIN_END() const int plain = min(PLAIN_STEPS_END(), WHOLE_STEPS())
#define PLAIN_END plain
#define LOAD_PLAIN LOAD_ANY
#endif

/* Of a warpgroup that is not the last one. */
#define LOAD_NOTHING(done) (void)0

/* The last warpgroup knows that all have finished step t, whose pair is the one before `pair`. */
#define ASK_EARLY(LOAD)                                               \
  do {                                                                \
    if (ASKS_EARLY) {                                                 \
      wgmma_wait(0);                                                  \
      bar_arrive(!is_last_group, FINISHED + pair.index, CTA_THREADS); \
      bar_sync(is_last_group, FINISHED + pair.index, CTA_THREADS);    \
      LOAD(t);                                                        \
    }                                                                 \
  } while (0)

/*
 * Step t > 0 begins: this warpgroup has finished step t-1, and takes the tensor cores. The last one so knows that all
 * have finished step t-1; a lone one that all its warps have.
 */
#define BEGIN_STEP()                                                      \
  do {                                                                    \
    if (WARPGROUPS == 1) bar_sync(1, FINISHED + pair.index, CTA_THREADS); \
    take_turn(TURN + group);                                              \
  } while (0)

/* What is issued in the step has been issued, and loads delay nothing. */
#define HAND_OVER(go, LOAD)       \
  do {                            \
    give_turn(go, next_turn);     \
    if (!ASKS_EARLY) LOAD(t - 1); \
  } while (0)

/*
 * S(t) = q k(t)^T, and O (+)= P(t-1) v(t-1).
 *
 * HIGH is a constant, but the compiler must not know that of it: it would build each descriptor's high half anew, one
 * or two instructions a product. With t in it, it is kept in a uniform register. At head_dim 256 there are too few of
 * them: there v's are built all the same, and q's descriptor is computed again in each step; a lone warpgroup is better
 * off with constants.
 */
#define UNKNOWN_ZERO ((uint32_t)t & p.zero)
#define HIGH (HEAD_DIM > 128 && WARPGROUPS == 1 ? DESCRIPTOR_HIGH : UNKNOWN_ZERO ^ DESCRIPTOR_HIGH)
#define HIGH_OF_V (HEAD_DIM > 128 ? DESCRIPTOR_HIGH : HIGH)
#define OF_STAGE(descriptor) ((descriptor) + pair.index * (KV_BYTES / DESCRIPTOR_UNIT))
#define V_BEHIND_K ((SHARED_V - SHARED_K) / DESCRIPTOR_UNIT + ((KV_BOX_BYTES - 16) / DESCRIPTOR_UNIT << 16))
#define V_DESCRIPTOR (LEAN_DESCRIPTORS ? OF_STAGE(k_descriptor) + V_BEHIND_K : OF_STAGE(v_descriptor))
#if Q_IN_REGISTERS
#define ISSUE_SCORES() issue_held<wgmma_scores>(s, q, OF_STAGE(k_descriptor), KV_BOX_BYTES, HEAD_DIM, HIGH)
#else
#define Q_DESCRIPTOR                                             \
  (HEAD_DIM > 128 ? matrix_descriptor(q_rows + UNKNOWN_ZERO, 16) \
                  : q_descriptor + Q_PLACE(q_parity ^ 1) / DESCRIPTOR_UNIT)
#define ISSUE_SCORES() \
  issue_shared<wgmma_scores>(s, Q_DESCRIPTOR, Q_BOX_BYTES, OF_STAGE(k_descriptor), KV_BOX_BYTES, HEAD_DIM, HIGH)
#endif
#define ISSUE_OUTPUT() issue_registers<wgmma_output>(o, probabilities, V_DESCRIPTOR, TILE_K, t > 1, HIGH_OF_V)

  /*
   * The pair of the next step is looked for at one place of a step, and awaited at a later one, where what was seen is
   * known; if it is late, the step ends in a branch. Measured, as the order is.
   */
  enum place { WITH_SCORES, BEFORE_MAXIMA, BEFORE_EXPONENTIALS, AT_THE_END };
#define LOOKS_AT \
  (PLAIN_64 || WINDOW_256 ? WITH_SCORES : PLAIN_LONG_128 || WINDOW_128 ? BEFORE_EXPONENTIALS : BEFORE_MAXIMA)
#define AWAITS_AT (PLAIN_LONG_128 || WINDOW_128 ? AT_THE_END : BEFORE_EXPONENTIALS)
#define PAIR_AT(here)                                                                \
  do {                                                                               \
    if (LOOKS_AT == here) {                                                          \
      state = state_of(pair.phase);                                                  \
      there = mbarrier_test(PAIR_BARRIER, state);                                    \
    }                                                                                \
    if (AWAITS_AT == here) there = mbarrier_wait(PAIR_BARRIER, state, there, TRIES); \
  } while (0)
#define BEGIN_WAIT()      \
  phase_state state = {}; \
  uint32_t there = 0;     \
  PAIR_AT(WITH_SCORES)

/* Measured. For bits two kernels with a list have no registers, and a softmax over half a tile no predicates. */
#define MASKING(part) (WINDOWED && (part) == WHOLE ? BY_BITS : COMPARED)

/* Measured (docs/kernel-measured.md); the fields are softmax_order's. */
#define ORDER                                                                                                \
  (ROWS == 32 && WINDOWED ? (softmax_order){1, {6, 4}, 0}                                                    \
   : ROWS == 32           ? (HEAD_DIM == 64 ? (softmax_order){1, {4, 4}, 0} : (softmax_order){2, {8, 8}, 0}) \
   : WARPGROUPS == 1 && HEAD_DIM == 256        ? (softmax_order){1, {5, 5}, 0}                               \
   : WARPGROUPS == 1                           ? ANY_ORDER                                                   \
   : PLAIN_64 && ONE_SEGMENT                   ? (softmax_order){2, {2, 2}, 0}                               \
   : PLAIN_64                                  ? (softmax_order){2, {4, 4}, 0}                               \
   : PLAIN_SHORT_128                           ? (softmax_order){1, {6, 4}, 0}                               \
   : PLAIN_LONG_128                            ? (softmax_order){2, {5, 5}, 0}                               \
   : HEAD_DIM == 256 && !LISTED                ? (softmax_order){2, {8, 8}, 0}                               \
   : HEAD_DIM == 64 && WINDOWED                ? (softmax_order){2, {6, 4}, 1}                               \
   : WINDOWED                                  ? ANY_ORDER                                                   \
   : HEAD_DIM == 64 && FORM == DHP_FORM_SINKS  ? (softmax_order){2, {4, 4}, 1}                               \
   : HEAD_DIM == 64                            ? (softmax_order){2, {2, 2}, 0}                               \
   : HEAD_DIM == 128 && !FORM                  ? (softmax_order){2, {6, 4}, 0}                               \
   : HEAD_DIM == 128 && FORM == DHP_FORM_SINKS ? (softmax_order){2, {2, 2}, 0}                               \
   : HEAD_DIM == 128                           ? (softmax_order){2, {8, 8}, 0}                               \
   : !FORM                                     ? (softmax_order){1, {8, 4}, 0}                               \
   : FORM == DHP_FORM_SOFTCAP                  ? (softmax_order){1, {2, 2}, 0}                               \
                                               : ANY_ORDER)

/* Of a part of a key tile: its keys, how many lie before them, and what a thread holds of their scores. */
#define KEYS_OF(part) ((part) == WHOLE ? TILE_K : TILE_K / 2)
#define KEYS_BEFORE(part) ((part) == LAST_HALF ? TILE_K / 2 : 0)
#define SCORES_OF(part) (KEYS_OF(part) / 2)
#define S_OF(part) (s + KEYS_BEFORE(part) / 2)

/* Softmax of a part of S(t). */
#define SOFTMAX(part, masked, LOAD)                                                     \
  do {                                                                                  \
    const int column = FIRST_KEY(t) + KEYS_BEFORE(part) + lane % 4 * 2;                 \
    int limit[THREAD_ROWS];                                                             \
    for (int r = 0; r < THREAD_ROWS; r++)                                               \
      limit[r] = row[r].last_key - column;                                              \
    SET_FIRST_COLUMNS(column);                                                          \
    PAIR_AT(BEFORE_MAXIMA);                                                             \
    CAP_SCORES();                                                                       \
    float scale[THREAD_ROWS];                                                           \
    softmax_shift<SCORES_OF(part)>(S_OF(part), &stats, scale, &p, limit, FIRST_COLUMNS, \
                                   masked ? MASKING(part) : UNMASKED, ORDER);           \
    if (masked) KEEP_HIDDEN(t);                                                         \
    ASK_EARLY(LOAD);                                                                    \
    PAIR_AT(BEFORE_EXPONENTIALS);                                                       \
    softmax_exponentials<SCORES_OF(part)>(S_OF(part), &stats, scale, ORDER);            \
    t++;                                                                                \
    PAIR_AT(AT_THE_END);                                                                \
    t += LATE_UNLESS(there);                                                            \
  } while (0)

/* P of a part of a key tile; that of the other half is 0. */
#define PACK(part)                                                                          \
  do {                                                                                      \
    pack_probabilities<SCORES_OF(part)>(probabilities + KEYS_BEFORE(part) / 4, S_OF(part)); \
    _Pragma("unroll") for (int i = 0; i < (SCORES - SCORES_OF(part)) / 2; i++)              \
        probabilities[((part) == FIRST_HALF ? SCORES / 4 : 0) + i] = 0;                     \
  } while (0)

/* Step t > 0 over a part of its key tile, with the mask or without, and with which of the two loads. */
#define RUN_STEP_OVER(part, masked, LOAD) \
  do {                                    \
    BEGIN_STEP();                         \
    ISSUE_SCORES();                       \
    ISSUE_OUTPUT();                       \
    HAND_OVER(1, LOAD);                   \
    pair = stage_after(pair);             \
    BEGIN_WAIT();                         \
    wgmma_wait(1);                        \
    SOFTMAX(part, masked, LOAD);          \
    wgmma_wait(0);                        \
    rescale_output(o, stats.rescale);     \
    PACK(part);                           \
  } while (0)
#define RUN_STEP(masked, LOAD) RUN_STEP_OVER(WHOLE, masked, LOAD)

/*
 * Steps while t < end: the loops that run most of a query tile's steps. If LOADERS_APART, warpgroups that load nothing
 * have one of their own, with fewer instructions. Where it was measured to gain.
 */
#define LOADERS_APART ((HEAD_DIM == 64 && WARPGROUPS > 1 && !LISTED) || PLAIN_SHORT_256)
#define RUN_STEPS_TO(end, masked, LOAD)                                   \
  do {                                                                    \
    if (!LOADERS_APART || is_last_group) {                                \
      _Pragma("unroll 1") while (t < end) RUN_STEP(masked, LOAD);         \
    } else {                                                              \
      _Pragma("unroll 1") while (t < end) RUN_STEP(masked, LOAD_NOTHING); \
    }                                                                     \
  } while (0)

/* Rows may see keys from a first one on. */
#if HAS_FIRST_KEYS
#define SET_FIRST_COLUMNS(column)       \
  int first_column[THREAD_ROWS];        \
  for (int r = 0; r < THREAD_ROWS; r++) \
  first_column[r] = row[r].first_key - (column)
#define FIRST_COLUMNS first_column
/* A tile before the window of a row leaves it as it is: its rescaling, exp2(x - x rounded), need not be 1. */
#define KEEP_HIDDEN(step)               \
  for (int r = 0; r < THREAD_ROWS; r++) \
  stats.rescale[r] = SEES_NONE_OF(r, step) ? 1.f : stats.rescale[r]
#else
#define SET_FIRST_COLUMNS(column)
#define FIRST_COLUMNS (const int *)0
#define KEEP_HIDDEN(step) (void)0
#endif

/* A list's tiles of v end with the sequence, before any product reads them. Few query tiles see that end. */
#if LISTED
#define CLEAR_BEYOND()                                                                                            \
  do {                                                                                                            \
    const int keys_here = keys_of_first(&now);                                                                    \
    if (keys_here < TILE_K) {                                                                                     \
      if (t >= LATE) AWAIT_LATE_PAIR();                                                                           \
      clear_rows(base + SHARED_V + pair.index * KV_BYTES, keys_here, (int)threadIdx.x & (WARPGROUP_THREADS - 1)); \
      fence_async_shared();                                                                                       \
      bar_sync(1, CLEARED + group, WARPGROUP_THREADS);                                                            \
    }                                                                                                             \
  } while (0)
#else
#define CLEAR_BEYOND()
#endif

/* With a zero that changes, or it would take a register ever after, where they are scarce. */
#define FIRST_ROW_OF_THREAD                                       \
  (warp % WARPS_PER_GROUP * (ROWS / WARPS_PER_GROUP) + lane / 4 + \
   (LISTED || (HEAD_DIM == 256 && !ONE_SEGMENT) ? nth & (int)p.zero : 0))

/* A query tile begins. */
#define BEGIN_ROWS()                                       \
  do {                                                     \
    t = 0;                                                 \
    for (int r = 0; r < THREAD_ROWS; r++) {                \
      row[r] = ROW_OF_THREAD(now, FIRST_ROW_OF_THREAD, r); \
      BEGIN_SUMS(r);                                       \
    }                                                      \
  } while (0)

/*
 * The last P v of a segment is issued together with S(0) of the next one, which has the same q; where there are no
 * registers for that, the next segment begins like another query tile.
 */
#define JOINS_SEGMENTS (!LISTED || HEAD_DIM <= 128)

/* q of the query tile that begins. */
#if Q_IN_REGISTERS
#define TAKE_QUERIES() hold_queries(q, q_rows, warp % WARPS_PER_GROUP, lane)
#else
#define TAKE_QUERIES()
#endif
#define BEGIN_QUERIES() \
  do {                  \
    q_parity ^= 1;      \
    TAKE_QUERIES();     \
  } while (0)
#define ASKED_QUERIES (next.key_tiles > 0 && !(JOINS_SEGMENTS && NEXT_SEGMENT() >= 0))
#define ASK_QUERIES()                                                                           \
  load_queries(loads_q && arrived && ASKED_QUERIES, &q_map, q_rows + Q_PLACE(q_parity), q_full, \
               FIRST_ROW(next) + (group << p.log2_rows), HEAD_OF(next), BATCH_OF(next))

/*
 * In step 0, once its products have been issued: the next segment or query tile, and what could not be asked for
 * without it.
 */
#define LOOK_AHEAD()                                                   \
  do {                                                                 \
    nth += NEXT_SEGMENT() < 0;                                         \
    next = NTH_QUERY_TILE(nth, NEXT_SEGMENT());                        \
    if (ASKS_AHEAD) ASK_QUERIES();                                     \
    load_skipped(arrived, &load, pairs_full, pair.index, &now, &next); \
  } while (0)

/* The next step's pair, however late it is. */
#define AWAIT_PAIR_AT_LENGTH()                                         \
  do {                                                                 \
    t += LATE_UNLESS(mbarrier_await(PAIR_BARRIER, pair.phase, TRIES)); \
    if (t >= LATE) AWAIT_LATE_PAIR();                                  \
  } while (0)

/* A step of others before this warpgroup's first one: it gives its turn on, and awaits the next step's pair. */
#define PASS_ON()                                               \
  do {                                                          \
    take_turn(TURN + group);                                    \
    give_turn(1, next_turn);                                    \
    pair = stage_after(pair);                                   \
    bar_arrive(ASKS_EARLY, FINISHED + pair.index, CTA_THREADS); \
    AWAIT_PAIR_AT_LENGTH();                                     \
  } while (0)

/* Whether somebody takes a turn after this one, as after all but the last warpgroup's last one. Who does not leave
 * early has no steps left. */
#define GOES_ON() (!(is_last_group && next.key_tiles == 0 && (!LEAVES_EARLY || t >= now.key_tiles)))

/*
 * The steps of others after this warpgroup's last one, whose P v has ended. The last warpgroup goes on asking for
 * pairs.
 */
#define PASS_ON_AFTER()             \
  do {                              \
    pair = stage_after(pair);       \
    t++;                            \
    AWAIT_PAIR_AT_LENGTH();         \
    take_turn(TURN + group);        \
    HAND_OVER(GOES_ON(), LOAD_ANY); \
  } while (0)

#define IS_PART() (IS_SPLIT | (!JOINS_SEGMENTS & (NEXT_SEGMENT() >= 0)))

/* The place of this CTA's parts, or of this item's. With the zero, or addresses would be computed before all query
 * tiles and take registers ever after. */
#define PLACE() ((IS_SPLIT ? (nth - 1) * (int)gridDim.x : 0) + (int)blockIdx.x)
#define THREAD_OF_PART ((int)threadIdx.x + (int)UNKNOWN_ZERO)
#define PART_OUT() part_out(&p, PLACE(), THREAD_OF_PART)
#define PART_SUMS(r) (part_sums(&p, PLACE(), THREAD_OF_PART) + 16 * (r)) /* two floats a row, eight rows apart */

/* After the last softmax of a segment, while its last P v is under way: sums of the quad. */
#define SUM_QUADS()                                                \
  do {                                                             \
    for (int r = 0; r < THREAD_ROWS; r++) {                        \
      stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 1); \
      stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 2); \
    }                                                              \
  } while (0)

/* The same with sums so far, if there are any, folded in. All lanes of a quad read them, and store others when they
 * have met. */
#define FOLD_SUMS(exist)                                                               \
  do {                                                                                 \
    float2 before[THREAD_ROWS];                                                        \
    for (int r = 0; r < THREAD_ROWS; r++) {                                            \
      before[r] = {-p.highest_score, 0.f};                                             \
      load_two_if(exist, &before[r], PART_SUMS(r));                                    \
    }                                                                                  \
    SUM_QUADS();                                                                       \
    for (int r = 0; r < THREAD_ROWS; r++)                                              \
      by[r] = fold_sums(&stats.shift[r], &stats.sum[r], before[r].x, before[r].y, &p); \
  } while (0)
#define STORE_SUMS()                                                     \
  do {                                                                   \
    __syncwarp();                                                        \
    for (int r = 0; r < THREAD_ROWS; r++)                                \
      store_two(1, PART_SUMS(r), stats.shift[r], stats.sum[r] + poison); \
  } while (0)

/* What makes O the output. */
#define SET_POISON() poison = arrived && !IS_BAD(now) ? 0.f : NAN
#define SET_FACTORS()                   \
  for (int r = 0; r < THREAD_ROWS; r++) \
  factor[r] = dhp_ct_reciprocal(stats.sum[r]) + poison

/*
 * Rows again, where they are stored, unless they have been kept: meanwhile their registers serve others. This and the
 * next choice are measured: they decide how ptxas mixes exponentials with the wait for P v in the loops above, which is
 * worth one to three per cent.
 */
#define KEEPS_ROWS                                              \
  (HEAD_DIM == 64    ? WARPGROUPS == 1 || LISTED || ONE_SEGMENT \
   : HEAD_DIM == 128 ? WARPGROUPS > 1 && LISTED                 \
                     : LISTED && FORM != DHP_FORM_SINKS)
#define OUTPUT_FIRST (HEAD_DIM == 64 || (HEAD_DIM == 128 && !ONE_SEGMENT)) /* of a row, before its lse */
#define SET_STORED(tile)                \
  query_row stored[THREAD_ROWS];        \
  const int row_end = ROW_END(tile);    \
  for (int r = 0; r < THREAD_ROWS; r++) \
  stored[r] = KEEPS_ROWS ? row[r] : ROW_OF_THREAD(tile, FIRST_ROW_OF_THREAD + (int)UNKNOWN_ZERO, r)

/* Where a row goes; one that sees no key is 0, whatever its tile held. */
#define OUT_ROW(of, x) \
  ((char *)p.out +     \
   2 * (BATCH_OF(of) * p.out_stride[0] + (HEAD_OF(of) + x.head) * p.out_stride[1] + x.row * p.out_stride[2]))
#define SEEN(x) ((uint32_t)(x.last_key < 0) - 1)
#define COLUMNS(x) (x.row < row_end ? p.head_dim : 0)

/* A row of O, whose products have ended. */
#define STORE_OUTPUT(of, x, r) store_row(OUT_ROW(of, x), o, r, factor[r], SEEN(x), COLUMNS(x), lane)

/* Its lse = scale shift + ln(sum). */
#define STORE_LSE(of, x, r)                                                                          \
  do {                                                                                               \
    const float lse = dhp_ct_log(stats.sum[r]) + stats.shift[r] * p.scale + poison;                  \
    const float of_none = LSE_OF_NONE(of, x); /* not within the choice, which would be a branch */   \
    store_one(p.lse != 0 && lane % 4 == 0 && x.row < row_end,                                        \
              p.lse + ((int64_t)BATCH_OF(of) * p.heads + HEAD_OF(of) + x.head) * p.seqlen_q + x.row, \
              x.last_key < 0 ? of_none : lse);                                                       \
  } while (0)

/* In one step the last P v of a segment, and S(0) of what comes next; O is stored while S(0) is computed. */
#define JOIN_STEPS()          \
  do {                        \
    BEGIN_STEP();             \
    wgmma_fence();            \
    ISSUE_OUTPUT();           \
    ISSUE_SCORES();           \
    HAND_OVER(1, LOAD_ANY);   \
    pair = stage_after(pair); \
    SET_POISON();             \
  } while (0)

/*
 * Step 0 ends: the softmax of S(0). Where all rows see all of its key tile, as in a segment that comes next and in most
 * calls without a causal mask, a branch leads around the mask. Where it was measured to gain.
 */
#define SKIPS_MASK (PLAIN_64 || PLAIN_LONG_128 || PLAIN_SHORT_256)
#define END_STEP_0(part)                                        \
  do {                                                          \
    BEGIN_WAIT();                                               \
    wgmma_wait(0);                                              \
    SOFTMAX(part, !SKIPS_MASK || MASKED_STEPS() > 0, LOAD_ANY); \
    PACK(part);                                                 \
    CLEAR_BEYOND();                                             \
  } while (0)

/*
 * The last step of a query tile that has one segment, P v, and step 0 of the next query tile: S(0).
 */
#define GO_ON_TO_QUERY_TILE()                   \
  do {                                          \
    BEGIN_QUERIES();                            \
    JOIN_STEPS();                               \
    SUM_QUADS();                                \
    SET_FACTORS();                              \
    SET_STORED(now);                            \
    for (int r = 0; r < THREAD_ROWS; r++)       \
      STORE_LSE(now, stored[r], r);             \
    const query_tile tile_of_done = now;        \
    now = next;                                 \
    BEGIN_ROWS();                               \
    LOOK_AHEAD();                               \
    wgmma_wait(1);                              \
    for (int r = 0; r < THREAD_ROWS; r++)       \
      STORE_OUTPUT(tile_of_done, stored[r], r); \
    END_STEP_0(WHOLE);                          \
  } while (0)

/*
 * The last step of a segment, and step 0 of the next one of this query tile: with those before it, it becomes a part.
 * Where there are registers for another batch, it is asked for before the sums, and sums are stored last.
 */
#define LOAD_BATCH(i) load_pieces<GO_BATCH>(RESUMES(), before[(i) % (AHEAD + 1)], PART_OUT(), (i) * GO_BATCH)
#define GO_ON_TO_SEGMENT()                                                              \
  do {                                                                                  \
    JOIN_STEPS();                                                                       \
    float before[AHEAD + 1][GO_BATCH][4];                                               \
    if (AHEAD > 1) LOAD_BATCH(0);                                                       \
    FOLD_SUMS(RESUMES());                                                               \
    if (AHEAD == 1) STORE_SUMS();                                                       \
    LOAD_BATCH(AHEAD - 1);                                                              \
    wgmma_wait(1);                                                                      \
    _Pragma("unroll") for (int i = 0; i < PIECES / GO_BATCH; i++) {                     \
      if (i + AHEAD < PIECES / GO_BATCH) LOAD_BATCH(i + AHEAD);                         \
      store_pieces<GO_BATCH>(o, by, before[i % (AHEAD + 1)], PART_OUT(), i * GO_BATCH); \
    }                                                                                   \
    if (AHEAD > 1) STORE_SUMS();                                                        \
    now = next;                                                                         \
    BEGIN_ROWS();                                                                       \
    LOOK_AHEAD();                                                                       \
    END_STEP_0(WHOLE);                                                                  \
  } while (0)

/* The last step of a segment, P v alone. */
#define FINISH_OUTPUT()             \
  do {                              \
    BEGIN_STEP();                   \
    if (!ASKS_AHEAD) ASK_QUERIES(); \
    wgmma_fence();                  \
    ISSUE_OUTPUT();                 \
    HAND_OVER(GOES_ON(), LOAD_ANY); \
    SET_POISON();                   \
  } while (0)

/* It is the only one of its query tile: O becomes the output. Without something behind its last store that is on no
 * condition, ptxas would jump around that store. */
#define STOP()                                         \
  do {                                                 \
    SUM_QUADS();                                       \
    SET_FACTORS();                                     \
    wgmma_wait(0);                                     \
    SET_STORED(now);                                   \
    for (int r = 0; r < THREAD_ROWS; r++) {            \
      if (!OUTPUT_FIRST) STORE_LSE(now, stored[r], r); \
      STORE_OUTPUT(now, stored[r], r);                 \
      if (OUTPUT_FIRST) STORE_LSE(now, stored[r], r);  \
    }                                                  \
    __syncwarp();                                      \
  } while (0)

/* Others come after it, or it is the work of this CTA alone: with those before it folded in, a part. */
#define STOP_AS_PART()                                                         \
  do {                                                                         \
    FOLD_SUMS(RESUMES());                                                      \
    STORE_SUMS();                                                              \
    wgmma_wait(0);                                                             \
    _Pragma("unroll") for (int first = 0; first < PIECES; first += GO_BATCH) { \
      float before[GO_BATCH][4];                                               \
      load_pieces<GO_BATCH>(RESUMES(), before, PART_OUT(), first);             \
      store_pieces<GO_BATCH>(o, by, before, PART_OUT(), first);                \
    }                                                                          \
  } while (0)

/* It is the last of several: with those before it folded in, the output. */
#define STOP_AS_LAST()                                                                                     \
  do {                                                                                                     \
    float before[BATCH][4];                                                                                \
    load_pieces<BATCH>(1, before, PART_OUT(), 0);                                                          \
    FOLD_SUMS(1);                                                                                          \
    SET_FACTORS();                                                                                         \
    wgmma_wait(0);                                                                                         \
    SET_STORED(now);                                                                                       \
    for (int r = 0; r < THREAD_ROWS; r++)                                                                  \
      STORE_LSE(now, stored[r], r);                                                                        \
    _Pragma("unroll") for (int i = 0; i < PIECES; i += 2) {                                                \
      const int r = i / ROW_PIECES;                                                                        \
      if (i > 0 && i % BATCH == 0) load_pieces<BATCH>(1, before, PART_OUT(), i);                           \
      store_last_pieces(OUT_ROW(now, stored[r]), o, i, by, before + i % BATCH, factor[r], SEEN(stored[r]), \
                        COLUMNS(stored[r]), lane);                                                         \
    }                                                                                                      \
    __syncwarp();                                                                                          \
  } while (0)

  /* One segment after another, of one query tile after another; if SEAMLESS, all of them in the inner loop. */
#pragma unroll 1
  for (;;) {
    query_tile next;
    query_row row[THREAD_ROWS];
    row_stats stats;
    float factor[THREAD_ROWS], poison; /* that makes O the output */
    fold_weights by[THREAD_ROWS];
    int t; /* the step of this segment; LATE more while a tile is late */

    /* Step 0, S(0) alone. */
    BEGIN_ROWS();
    BEGIN_QUERIES();
#if OWN_TILES
#pragma unroll 1
    for (int others = steps_before(&p, &now); others > 0; others--)
      PASS_ON();
#endif
    take_turn(TURN + group);
    ISSUE_SCORES();
    give_turn(1, next_turn);
    pair = stage_after(pair);
    LOOK_AHEAD();
    if (BEGINS_WITH_HALF())
      END_STEP_0(FIRST_HALF);
    else
      END_STEP_0(WHOLE);

#pragma unroll 1
    for (;;) {
      /* The steps after step 0, but for one over a last half. Most of them ask for this segment's own pairs only. Masks
       * of windows are in the last ones, too. */
#pragma unroll 1
      while (t < min(MASKED_STEPS(), WHOLE_STEPS()))
        RUN_STEP(1, LOAD_ANY);
#if HAS_PLAIN_STEPS
      READ_PLAIN_END();
      RUN_STEPS_TO(PLAIN_END, 0, LOAD_PLAIN);
#pragma unroll 1
      while (t < WHOLE_STEPS())
        RUN_STEP(HAS_FIRST_KEYS, LOAD_ANY);
#else
      RUN_STEPS_TO(WHOLE_STEPS(), 0, LOAD_ANY);
#endif
      if (SEAMLESS) t += LATE_QUERIES(ASKED_QUERIES);
      if (SEAMLESS & (t < LATE) & (next.key_tiles > 0) & !IS_SPLIT & !RESUMES() & (NEXT_SEGMENT() < 0))
        GO_ON_TO_QUERY_TILE();
      else if (t >= LATE) {
        AWAIT_LATE_PAIR();
        if (SEAMLESS) AWAIT_LATE_QUERIES(ASKED_QUERIES);
      } else if (JOINS_SEGMENTS & (NEXT_SEGMENT() >= 0))
        GO_ON_TO_SEGMENT();
      else
        break;
    }

    if (ENDS_WITH_HALF()) {
      RUN_STEP_OVER(LAST_HALF, 1, LOAD_ANY);
      if (t >= LATE) AWAIT_LATE_PAIR();
    }
    FINISH_OUTPUT();
    if (!IS_PART() & !RESUMES())
      STOP();
    else if (IS_PART())
      STOP_AS_PART();
    else
      STOP_AS_LAST();
#if LEAVES_EARLY
#pragma unroll 1
    while (t < now.key_tiles)
      PASS_ON_AFTER();
#endif
    now = next;
    /* if SEAMLESS, q has been awaited in the inner loop */
    if (!SEAMLESS) t += LATE_QUERIES(now.key_tiles > 0);
    if (!SEAMLESS & (t < LATE) & (now.key_tiles > 0)) continue;
    if (now.key_tiles == 0) break;
    if (!SEAMLESS) AWAIT_LATE_QUERIES(1);
  }
  if (SEAMLESS) end_together();
}
