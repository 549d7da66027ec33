/*
 * attention_decode.cu - FlashAttention forward for few queries over many keys on Hopper, with the bits of
 * attention_fwd.cu. A cluster of CTAs computes eight query rows, over the keys of a segment; where there are
 * several, the fold family makes one row of their parts.
 *
 * A part of a row is one chain over the key tiles of a segment, from the last visible one down: a running maximum, and
 * O and the sum rescaled at every tile. What of that may be shared without changing a bit:
 *
 *     1. S(t) = q k(t)^T, one tile a warp, all tiles of the unit at once, kept in registers; the tile's highest score
 *        of each row goes to all CTAs.
 *     2. The running maximum before and after t follows from the highest scores of the tiles visited before, in any
 *        order. So every warp can compute P(t), its sum, and what rescales the sums before; all CTAs get these.
 *     3. O = O rescale(t) + P(t) v(t), for each tile in order: each CTA its own strip of v, a warp eight columns.
 *     4. O / sum, or O, the shift and the sum as a part; NaN if a warp of the cluster has waited in vain.
 *
 * Each element of k and of v is read from device memory once. Of k each warp loads what it needs, one box of columns
 * after the other into the same place; when it has finished, it asks for strips of v, which so come while steps 1 and 2
 * end. In step 3 a warp that does not multiply asks for further strips when all who multiply have finished a group.
 *
 * What goes to other CTAs completes bytes on mbarriers there, like tiles that TMA brings. The cluster's barrier says
 * that all CTAs have begun, before the first such store; that all have told what they had to, after each step; and in
 * the end that nothing follows. A warp whose tile is late sleeps, for half a millisecond, and who needs what it tells
 * must not give up meanwhile: that barrier waits in hardware, as long as it takes, so an mbarrier is left with the time
 * that a store or a load is under way.
 *
 * mma of 16 rows has the bits of wgmma of 64, and the same layout, of which here half is rows of zeros. Every mbarrier
 * has one phase only.
 *
 * CT: q, k and v only ever meet mma, fused multiply-adds, selects, max, ex2, rcp, lg2, conversions and quad shuffles
 * with constant lanes, and are stored to places in shared memory that tile, lane and CTA give. Every branch, address,
 * barrier and predicate is a function of the block index and the launch parameters, or of whether a tile has arrived. A
 * wait is a look and up to four suspending tries, and after them, if they were in vain, a fixed sequence of others, and
 * of sleeps; if a warp has waited in vain, all rows of the cluster are NaN.
 */
#include <cuda.h>

#include "layout.cuh"
#include "output.cuh"
#include "scores.cuh"
#include "shares.cuh"
/* This uses the constants above. */
#include "../../hopper/softmax.cuh"

enum { TRIES = 4 }; /* of a wait: 16 us */

/*
 * A wait for the only phase of an mbarrier ends in a branch: so to wait at length costs no more than that branch where
 * the phase comes within 16 us. Who waits at length sleeps (mbarrier_wait_first).
 */
static __device__ __forceinline__ uint32_t at_length(uint32_t came, uint32_t barrier, uint32_t zero) {
  return any_lane(!came) ? mbarrier_wait_first(barrier, PHASE(0), zero) : 1;
}
static __device__ __forceinline__ uint32_t await(uint32_t barrier, uint32_t zero) {
  return at_length(mbarrier_await(barrier, PHASE(0), TRIES), barrier, zero);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CTA_THREADS, CTAS_PER_SM)
dhp_attention_decode(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                     const __grid_constant__ dhp_decode_params p) {
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + DHP_DECODE_ALIGN - 1) & ~(uint32_t)(DHP_DECODE_ALIGN - 1);
  const int warp = warp_index(), lane = (int)(threadIdx.x % 32);
  const uint32_t k_full = base + SHARED_BARRIERS + K_FULL + 8 * warp * K_LOADS;
  const unit u = unit_of(&p);

  init_barriers(base, &u, warp);
  tma_prefetch_map(&k_map); /* by all warps: ptxas then keeps the addresses of maps in uniform registers */
  tma_prefetch_map(&v_map);
  await_launches_before();
  begin_launches_after();
  load_keys(1, 0, &u, warp, &k_map, base); /* a warp's mbarriers of k are its own: it has met with itself */
  expect_shares(base, &u, warp);
  __syncthreads();
  cluster_arrive(); /* this CTA has begun: its shared memory can be written to */

  const int of_unit = lane / 4, head = of_unit >> p.log2_rows, row = u.row + (of_unit & ((1 << p.log2_rows) - 1));
  const int last_key = min(row + p.highest, p.seqlen_k - 1);

  /* 1. Scores, and the highest of each tile. */
  float s[TILES_PER_WARP][SCORES];
  uint32_t arrived = 1;
  {
    uint32_t q[HEAD_DIM / 8];
    hold_queries(q, &p, u.batch, u.head + head, row, lane);
#pragma unroll
    for (int nth = 0; nth < K_LOADS; nth++) {
      float *const of_tile = s[nth / BOXES];
#pragma unroll
      for (int i = 0; i < SCORES && nth % BOXES == 0; i++)
        of_tile[i] = 0.f;
      arrived &= await(k_full + 8 * nth, p.zero);
      multiply_keys(of_tile, q + nth % BOXES * (K_COLUMNS / 8), base + SHARED_BOXES + warp * BOX_BYTES, lane);
      hand_to_tma(warp);
      if (nth + 1 < K_LOADS)
        load_keys((int)arrived, nth + 1, &u, warp, &k_map, base);
      else
        load_strips((int)arrived, warp * STRIPS_PER_BOX, STRIPS_PER_BOX, &u, &v_map, base);
    }
  }
  cluster_wait();
#pragma unroll
  for (int nth = 0; nth < TILES_PER_WARP; nth++) {
    const int tile = tile_of_warp(&u, warp, nth);
    const int limit = last_key - first_key(&u, tile) - lane % 4 * 2;
    row_stats of_tile = {{-p.highest_score}, {0.f}, {0.f}};
    float scale;
    softmax_shift(s[nth], &of_tile, &scale, &p, &limit, 0, COMPARED, ANY_ORDER);
    tell_top(base, tile, of_tile.shift[0], lane);
  }
  cluster_arrive();
  cluster_wait();
  arrived &= await(base + SHARED_BARRIERS + TOPS_FULL, p.zero);

  /* 2. Probabilities. */
#pragma unroll
  for (int nth = 0; nth < TILES_PER_WARP; nth++) {
    const int tile = tile_of_warp(&u, warp, nth);
    row_stats stats = {{top_before(base, tile, -p.highest_score, lane)}, {0.f}, {0.f}};
    float scale;
    uint32_t probabilities[SCORES / 2];
    softmax_shift(s[nth], &stats, &scale, &p, 0, 0, UNMASKED, ANY_ORDER);
    softmax_exponentials(s[nth], &stats, &scale, ANY_ORDER);
    pack_probabilities(probabilities, s[nth]);
    tell_probabilities(base, &u, tile, warp, probabilities, stats.rescale[0], stats.sum[0], lane);
  }
  cluster_arrive();
  cluster_wait();

  /* 3. O, tile after tile. */
  float o[OUTPUTS] = {0.f, 0.f, 0.f, 0.f}, sum = 0.f;
  if (warp < OUTPUT_WARPS) {
    operands x[2];
    arrived &= await(group_full(base, 0), p.zero);
    fetch(&x[0], 0, base, warp, lane);
#pragma unroll 1
    for (int first = 0; first < u.tiles; first += GROUP) {
      const uint32_t next = group_full(base, min(first + GROUP, u.tiles - 1));
      uint32_t came = 0;
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        /* The next group is looked for beside the last tile but one, and awaited beside the last one. */
        if (i == GROUP - 1) {
          came = mbarrier_wait(next, state_of(PHASE(0)), came, TRIES);
          /* Nobody reads this group's strips any more. They meet the loader, and do not only arrive: a warp that has
           * waited in vain would come to the same barrier again before the others have met there once. */
          barrier_sync(first + STAGES * GROUP < u.tiles, FINISHED + (uint32_t)first / GROUP % STAGES, GROUP_THREADS);
          arrived &= at_length(came, next, p.zero);
        }
        fetch(&x[(i + 1) % 2], min(first + i + 1, TILES - 1), base, warp, lane);
        if (i == GROUP - 2) came = mbarrier_test(next, state_of(PHASE(0)));
        multiply_values(o, &sum, &x[i % 2], first + i < u.tiles);
      }
    }
  }
  if (warp == LOADER) {
    int first = STAGES * GROUP;
#pragma unroll 1
    for (; first < u.tiles; first += GROUP) {
      arrived &= await(group_full(base, first - STAGES * GROUP), p.zero);
      barrier_sync(1, FINISHED + (uint32_t)first / GROUP % STAGES, GROUP_THREADS);
      load_strips((int)arrived, first, GROUP, &u, &v_map, base);
    }
    /* P of tiles that there are not: nobody needs it, but this CTA may not end before it has come, nor the one that it
     * is copied from. */
#pragma unroll 1
    for (first = (u.tiles + GROUP - 1) / GROUP * GROUP; first < TILES; first += GROUP)
      arrived &= await(group_full(base, first), p.zero);
  }
  tell_arrived(base, u.rank, warp, arrived, lane);
  cluster_arrive(); /* it tells the others nothing more */

  /* 4. The sums of the quad meanwhile. Warps that have no columns store nothing. */
  sum += __shfl_xor_sync(FULL_MASK, sum, 1);
  sum += __shfl_xor_sync(FULL_MASK, sum, 2);
  const float shift = top_before(base, u.tiles, -p.highest_score, lane);
  cluster_wait();
  cluster_arrive();
  const uint32_t told = await(base + SHARED_BARRIERS + POISON_FULL, p.zero);
  const float poison = poison_of_all(base, lane) + (told ? 0.f : NAN), factor = dhp_ct_reciprocal(sum) + poison;
  const int inside = warp < OUTPUT_WARPS && row < p.seqlen_q, sees_none = last_key < 0;
  const int column = u.rank * STRIP + warp * 8 + lane % 4 * 2;
  const int64_t of_row = ((int64_t)u.batch * p.heads + u.head + head) * p.seqlen_q + row;
  const int64_t at = u.batch * p.out_stride[0] + (u.head + head) * p.out_stride[1] + row * p.out_stride[2] + column;
  /* a row that sees no key is 0, whatever its tile held */
  store_word(inside && p.splits == 1 && column < p.head_dim, (uint32_t *)((char *)p.out + 2 * at),
             pack_two(o[0] * factor, o[1] * factor) & ((uint32_t)sees_none - 1));
  /* lse = scale shift + ln(sum) */
  const float lse = dhp_ct_log(sum) + shift * p.scale + poison;
  const int is_first = u.rank == 0 && warp == 0 && lane % 4 == 0;
  store_one(inside && p.splits == 1 && p.lse != 0 && is_first, p.lse + of_row, sees_none ? -INFINITY : lse);
  /* or its part */
  float *const part = p.part_out + ((int64_t)u.place * ROWS * HEAD_DIM + offset_in_place(of_unit, column));
  store_two(p.splits > 1 && warp < OUTPUT_WARPS, part, o[0], o[1]);
  store_two(p.splits > 1 && is_first, p.part_sums + ((int64_t)u.place * ROWS + of_unit) * 2, shift, sum + poison);
  cluster_wait(); /* long since over; without it ptxas ends a thread that has nothing to store by a predicated exit */
}
