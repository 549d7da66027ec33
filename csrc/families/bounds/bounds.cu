/*
 * bounds.cu - how large the elements of k and of v are that a query row sees: from that delta.cu makes the unit in
 * which the shares of its dq are added up.
 *
 * A row sees the keys up to one, so what it needs are maxima over the keys up to there. A CTA makes them for a tile of
 * keys; whoever wants them for a row adds those of the last keys of the tiles before. A row's bits must not depend on
 * keys that it does not see, which a maximum over whole tiles would break.
 *
 * Elements of k that are not finite have no part in that: they make NaN in their column of dq and in no other, and
 * integers have none. So their columns are noted.
 *
 * A key is read by LANES lanes, eight elements each. A warp has LANES turns of 32 / LANES keys, so that each lane ends
 * up with one key: that of the turn with its number. Of neighbouring lanes then are neighbouring keys.
 *
 * CT: k and v only ever meet conversions, multiplications, additions (of words, too), maxima, the logarithm of ct.h,
 * masks, of which those by not_finite are secret themselves, shifts and selects that are public, and shuffles with
 * constant lanes. Addresses and predicates are functions of the thread, the block
 * index and the parameters.
 */
#include "../../hopper/row_bounds.cuh"
#include "params.h"

enum {
  EIGHT = 8,                /* elements of 16 bytes */
  LANES = HEAD_DIM / EIGHT, /* that share a key */
  TURNS = LANES,
  WARPS = WARPGROUPS * 4,
  WORDS = HEAD_DIM / 32 /* of a bit for each column */
};

static_assert(32 % LANES == 0 && ROWS == WARPS * 32 && ROWS == KEYS_OF_TILE, "a lane ends up with one key");

/* The top bit of each half of a word: set if the element is not finite, that is if all bits of its exponent are. */
static __device__ __forceinline__ uint32_t not_finite(uint32_t two) {
  const uint32_t infinity = ELEMENT_IS_BFLOAT16 ? 0x7f80u : 0x7c00u;
  return ((two & 0x7fff7fffu) + (0x8000u - infinity) * 0x10001u) & 0x80008000u;
}

/* Takes the elements that are not finite out of eight; returns a bit for each that was. */
static __device__ __forceinline__ uint32_t take_not_finite(uint4 *x) {
  uint32_t bits = 0, *const words[4] = {&x->x, &x->y, &x->z, &x->w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t found = not_finite(*words[i]);
    *words[i] &= ~((found >> 15) * 0xffffu);
    bits |= (found >> 15 & 1 | found >> 30) << 2 * i;
  }
  return bits;
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, CTAS_PER_SM)
dhp_attention_bounds(const __grid_constant__ dhp_bounds_params p) {
  extern __shared__ float2 up_to[]; /* each key of the tile, of its warp's keys; then the columns of each warp, bytes */
  uint8_t *const columns_of = (uint8_t *)(up_to + ROWS);
  const int thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int head_of_all = (int)blockIdx.x / p.tiles, tile = (int)blockIdx.x - head_of_all * p.tiles;
  const int batch = head_of_all / p.heads, head = head_of_all - batch * p.heads;
  const int column = lane % LANES * EIGHT, first = tile * ROWS + warp * 32 + lane / LANES * LANES;
  const uint32_t inside = column < p.head_dim ? ~0u : 0;
  const int readable = inside ? column : 0;
  const char *const k = (const char *)p.k + 2 * (batch * p.k_stride[0] + head * p.k_stride[1] + readable);
  const char *const v = (const char *)p.v + 2 * (batch * p.v_stride[0] + head * p.v_stride[1] + readable);
  await_launches_before();
  begin_launches_after();

  uint4 k_eight[TURNS], v_eight[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const int64_t there = min(first + turn, p.seqlen_k - 1);
    k_eight[turn] = *(const uint4 *)(k + 2 * there * p.k_stride[2]);
    v_eight[turn] = *(const uint4 *)(v + 2 * there * p.v_stride[2]);
  }
  uint32_t largest = 0,
           columns = 0; /* largest: of v in the low half, of k in the other; columns: of this lane's eight */
  float squares = 0.f, of_v, of_k;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const uint32_t exists = first + turn < p.seqlen_k ? inside : 0;
    uint4 of_key = masked(k_eight[turn], exists);
    const uint4 of_value = masked(v_eight[turn], exists);
    columns |= take_not_finite(&of_key);
    uint32_t both = largest_of_eight(of_value) | largest_of_eight(of_key) << 16;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      both = larger_halves(both, __shfl_xor_sync(FULL_MASK, both, step));
    unpack_two(&of_v, &of_k, both);
    float x[EIGHT];
    unpack_two(&x[0], &x[1], of_value.x);
    unpack_two(&x[2], &x[3], of_value.y);
    unpack_two(&x[4], &x[5], of_value.z);
    unpack_two(&x[6], &x[7], of_value.w);
    float sum = squares_of_eight(x, power_for(of_v));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      sum += __shfl_xor_sync(FULL_MASK, sum, step);
    largest = lane % LANES == turn ? both : largest;
    squares = lane % LANES == turn ? sum : squares;
  }
  unpack_two(&of_v, &of_k, largest);
  const float power = power_for(of_k);
  float2 most = make_float2(log2_norm(squares, power_for(of_v)), dhp_ct_log2(of_k * power) + log2_removed(power));

  /* The lowest lanes get their own again: a maximum with itself. */
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    most =
        max_or_nan(most, make_float2(__shfl_up_sync(FULL_MASK, most.x, step), __shfl_up_sync(FULL_MASK, most.y, step)));
#pragma unroll
  for (int step = LANES; step < 32; step *= 2)
    columns |= __shfl_xor_sync(FULL_MASK, columns, step);
  up_to[thread] = most;
  columns_of[warp * LANES + lane % LANES] = (uint8_t)columns; /* lanes of the same columns write the same */
  __syncthreads();
#pragma unroll
  for (int before = 0; before < WARPS - 1; before++)
    most = max_or_nan(most, up_to[before < warp ? before * 32 + 31 : thread]);

  const int64_t at = (int64_t)head_of_all * p.tiles + tile;
  *(float2 *)(p.bounds + (at * ROWS + thread) * 2) = most;
  uint32_t word = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++)
    word |= ((const uint32_t *)columns_of)[w * WORDS + thread % WORDS];
  store_word(thread < WORDS, p.columns + at * WORDS + thread % WORDS, word);
  end_together();
}
