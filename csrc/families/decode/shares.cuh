/*
 * shares.cuh - what the CTAs of a cluster tell each other through their shared memory: of each key tile the highest
 * scores, then the probabilities and sums; in the end, who has waited in vain. Everybody gets everything.
 *
 * Which tile, which row, which CTA: all addresses are public. Before this header: the constants of the kernel.
 */
#ifndef DHP_DECODE_SHARES_CUH
#define DHP_DECODE_SHARES_CUH

#include "unit.cuh"

/* How many tiles of a group this CTA computes the probabilities of. */
static __device__ __forceinline__ int own_tiles(const unit *u, int group) {
  return CLUSTER <= GROUP ? GROUP / CLUSTER : group % (CLUSTER / GROUP) == u->rank / GROUP;
}

/* The mbarriers, each by one warp. The strips of v that come first are asked for by several warps a group, later ones
 * by one, if there are any; of every group a warp tells beforehand how many bytes of P will come from other CTAs, and
 * who computes a tile of it here says when that is done. */
static __device__ __forceinline__ void init_barriers(uint32_t base, const unit *u, int warp) {
  const uint32_t barriers = base + SHARED_BARRIERS;
#pragma unroll
  for (int i = 0; i < K_LOADS; i++)
    mbarrier_init(barriers + K_FULL + 8 * (warp * K_LOADS + i), 1);
#pragma unroll
  for (int i = 0; i < GROUPS / WARPS; i++) {
    const int group = i * WARPS + warp;
    mbarrier_init(barriers + GROUP_FULL + 8 * group,
                  (group < STAGES ? GROUP / STRIPS_PER_BOX : group * GROUP < u->tiles) + 1 + own_tiles(u, group));
  }
  mbarrier_init_by(warp == 0, barriers + TOPS_FULL, 1);
  mbarrier_init_by(warp == 1, barriers + POISON_FULL, 1);
  fence_mbarrier_init();
  __syncwarp();
}

/* How many bytes will come from CTAs of the cluster; of P, from the others. Of tiles that there are not, too. */
static __device__ __forceinline__ void expect_shares(uint32_t base, const unit *u, int warp) {
  const uint32_t barriers = base + SHARED_BARRIERS;
#pragma unroll
  for (int i = 0; i < GROUPS / WARPS; i++)
    mbarrier_arrive_expect_tx(1, barriers + GROUP_FULL + 8 * (i * WARPS + warp),
                              (GROUP - own_tiles(u, i * WARPS + warp)) * SHARE_BYTES);
  mbarrier_arrive_expect_tx(warp == 0, barriers + TOPS_FULL, TILES * ROWS * 4 * TOP_COPIES);
  mbarrier_arrive_expect_tx(warp == 1, barriers + POISON_FULL, WARPS * 32 * 4);
}

/* Row lane / 4 of a tile, to all CTAs, the lanes of a quad in turn; with two CTAs to each twice. */
static __device__ __forceinline__ void tell_top(uint32_t base, int tile, float top, int lane) {
  const uint32_t here = base + SHARED_TOPS + (tile * ROWS + lane / 4) * 4, full = base + SHARED_BARRIERS + TOPS_FULL;
#pragma unroll
  for (int first = 0; first < CLUSTER; first += 4) {
    const int rank = (first + lane % 4) % CLUSTER;
    store_async_one(address_in_cta(here, rank), address_in_cta(full, rank), top);
  }
}

/* The highest score of this thread's row in the tiles before this one; `least` if there is none. A maximum is the same
 * in any order. */
static __device__ __forceinline__ float top_before(uint32_t base, int tile, float least, int lane) {
  const uint32_t tops = base + SHARED_TOPS + lane / 4 * 4;
  float top = least;
#pragma unroll
  for (int i = 0; i < TILES; i += 4) {
    const float of_tile = load_shared_one(tops + (i + lane % 4) * ROWS * 4);
    top = fmaxf(top, i + lane % 4 < tile ? of_tile : least);
  }
  top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, 1));
  return fmaxf(top, __shfl_xor_sync(FULL_MASK, top, 2));
}

/*
 * What this warp asked of its places in shared memory has been done, and TMA may write and read there. __syncwarp is
 * nothing to ptxas: a load that follows it is issued while ldmatrix is under way, and where k is in L2 already it
 * overtakes what waits its turn.
 */
static __device__ __forceinline__ void hand_to_tma(int warp) {
  fence_async_shared();
  bar_sync(1, OWN_BARRIER + warp, 32);
}

/*
 * Packed probabilities of a tile, and of this thread's row and columns what rescales the sums before, and its sum: into
 * the tile's place in this CTA, and from there into that of every other one.
 */
static __device__ __forceinline__ void tell_probabilities(uint32_t base, const unit *u, int tile, int warp,
                                                          const uint32_t *probabilities, float rescale, float sum,
                                                          int lane) {
  const uint32_t share = share_of(base, tile), of_lane = share + lane * 8, full = group_full(base, tile);
#pragma unroll
  for (int step = 0; step < STEPS; step++) /* the words between are of rows that are not used */
    store_shared_two(of_lane + step * STEP_BYTES, probabilities[4 * step], probabilities[4 * step + 2]);
  store_shared_two(of_lane + P_BYTES, __float_as_uint(rescale), __float_as_uint(sum));
  hand_to_tma(warp);
  mbarrier_arrive_expect_tx(1, full, 0);
#pragma unroll
  for (int i = 1; i < CLUSTER; i++) {
    const int rank = (u->rank + i) % CLUSTER;
    copy_async(address_in_cta(share, rank), share, SHARE_BYTES, address_in_cta(full, rank));
  }
}

/* Whether this warp's tiles have all come. */
static __device__ __forceinline__ void tell_arrived(uint32_t base, int rank, int warp, uint32_t arrived, int lane) {
  const uint32_t here = base + SHARED_POISON + (rank * WARPS + warp) * 4;
  const uint32_t full = base + SHARED_BARRIERS + POISON_FULL;
  const int to = lane % CLUSTER; /* by several lanes to each */
  store_async_one(address_in_cta(here, to), address_in_cta(full, to), arrived ? 0.f : NAN);
}

/* 0, or NaN if a warp of the cluster has waited in vain. */
static __device__ __forceinline__ float poison_of_all(uint32_t base, int lane) {
  const uint32_t poison = base + SHARED_POISON + lane % (CLUSTER * WARPS) * 4;
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < CLUSTER * WARPS; i += 32)
    all += load_shared_one(poison + 4 * i);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2)
    all += __shfl_xor_sync(FULL_MASK, all, mask);
  return all;
}

#endif
