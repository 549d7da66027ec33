/*
 * dq_sums.cuh - a CTA's share of dq: from dS in registers to integers that are added up in global memory.
 *
 *     dq = dS k        dS goes to shared memory from registers, transposed; k is there.
 *
 * Of a step's share a warpgroup computes 64 rows and 64 columns: half of the rows at head_dim 64, else half of the
 * columns. All CTAs of a head add to the same rows, whenever they come to it. Sums of integers do not depend on the
 * order, not even if they wrap around on the way. A float becomes an integer in units of its query row: so many are 1
 * that the sum of the row fits (../delta/units.cuh); a power of two, so that only bits below the unit are lost.
 *
 * Before this header: layout.cuh, and HEAD_DIM columns in boxes of 64.
 *
 * CT: shares meet multiplications, conversions that saturate and do not branch, and sums at public addresses.
 */
#ifndef DHP_BACKWARD_DQ_SUMS_CUH
#define DHP_BACKWARD_DQ_SUMS_CUH

#include "../../hopper/products.cuh"
#include "layout.cuh"

enum {
  DQ_FLOATS = DQ_BLOCK_COLUMNS / 2, /* that a thread holds */
  SPLITS_ROWS = HEAD_DIM == 64,
  KEYS = WARPGROUPS * ROWS,                  /* of a CTA */
  FOUR_BYTES = 32 * 4 * (int)sizeof(int32_t) /* four integers of each lane, next to each other in the block */
};

/* dS of this warpgroup's 64 keys, packed, to shared memory: rows of queries, as the product of dq reads them. */
static __device__ __forceinline__ void store_score_gradients(uint32_t to, const uint32_t *packed_ds, int lane,
                                                             int warp_of_group) {
  const int chunk = warp_of_group * 2 + (lane >> 3 & 1); /* of eight keys */
  const uint32_t address = to + ((lane >> 4) * 8 + (lane & 7)) * ROW_BYTES + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
  for (int block = 0; block < WALK / 8; block += 2)
    store_matrices_transposed(address + block * 8 * ROW_BYTES, packed_ds + 2 * block);
}

/* This warpgroup's part of dS k, over all keys of the CTA. ds: its rows; k: its columns. */
template <product_of_shared fresh, product_of_shared product>
static __device__ __forceinline__ void issue_dq(float *dq, uint32_t ds, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < WARPGROUPS * ROWS / STEP; step++) {
    const int group = step / (ROWS / STEP), in_group = step % (ROWS / STEP) * STEP;
    const uint32_t a = ds + (group * WALK * ROW_BYTES + in_group * 2) / DESCRIPTOR_UNIT;
    const uint32_t b = k + (group * OWN_BYTES + in_group * ROW_BYTES) / DESCRIPTOR_UNIT;
    if (step == 0)
      fresh(dq, a, b, 0);
    else
      product(dq, a, b, 1);
  }
  wgmma_commit();
}

/* Where a warp's part of a share belongs: its query rows. */
typedef struct share {
  int head, block;
  int exists; /* there was a step, and the block has a query row */
} share;

/* Its sums. */
static __device__ __forceinline__ int32_t *sums_of(const dhp_bwd_params *p, int batch, const share *s, int group) {
  const int64_t box = ((int64_t)batch * p->heads + s->head) * BOXES + (SPLITS_ROWS ? 0 : group);
  return p->sums + (box * p->blocks + s->block) * (BLOCK_BYTES / (int)sizeof(int32_t));
}

/* The first unit of its head, counted over all heads. */
static __device__ __forceinline__ int64_t first_unit(const dhp_bwd_params *p, int batch, const share *s) {
  return ((int64_t)batch * p->heads + s->head) * p->seqlen_q;
}

/* Of this thread's two rows, the place of the unit of the one r; beyond the last row, of the last one. */
static __device__ __forceinline__ uint8_t *unit_of_row(const dhp_bwd_params *p, int batch, const share *s, int r,
                                                       int lane) {
  const int row = min(s->block * DQ_BLOCK_ROWS + lane / 4 + 8 * r, p->seqlen_q - 1);
  return p->units + first_unit(p, batch, s) + row;
}

/*
 * Integers have no Inf and no NaN: a row of dS that has one gets NAN_UNIT. Between bfloat16 numbers none comes up that
 * the unit does not already tell of, but a dS of float16, for which this is, ends at 65504. Then no column of the share
 * is finite; where k is not, only those columns are that dq_out knows of. All bits of NAN_UNIT are set, so that who
 * sets them, and when, does not matter.
 *
 * A lane sees some columns of two rows, so four lanes have to agree on a row. Then each lane tells of a word of units,
 * four rows, from the word with the first row on: five at most have something to tell, and the others set no bits in a
 * line of this warp's own. If all lanes, or CTAs with a share of few rows, went to the same words, they would queue up
 * at the L2 cache, and TMA behind them, for longer than a wait; none but those that have something to tell would be a
 * branch.
 */
static __device__ __forceinline__ void mark_rows(const dhp_bwd_params *p, const walk *w, const share *s,
                                                 const float *dq, int warp, int lane) {
  uint32_t rows[2]; /* bit 4 n of rows[r]: row 8 r + n of the block has no finite column */
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float smallest = NAN; /* the smaller one of a number and NaN is the number */
#pragma unroll
    for (int i = 2 * r; i < DQ_FLOATS; i += 4)
      smallest = fminf(smallest, fminf(fabsf(dq[i]), fabsf(dq[i + 1])));
    const uint32_t lanes = __ballot_sync(FULL_MASK, __float_as_uint(smallest) >= 0x7f800000u); /* Inf, or NaN */
    const uint32_t pairs = lanes & lanes >> 1;
    rows[r] = pairs & pairs >> 2;
  }
  const int64_t unit = first_unit(p, w->batch, s) + s->block * DQ_BLOCK_ROWS; /* of the block's row 0 */
  const int before = (int)(unit & 3), row = 4 * lane - before;                /* the first one of this lane's word */
  const int left = min(p->seqlen_q - s->block * DQ_BLOCK_ROWS, DQ_BLOCK_ROWS) - row; /* then come others' units */
  const uint32_t low = row < 0 ? 0 : row < 8 ? rows[0] : rows[1], high = row < 0 ? rows[0] : row < 8 ? rows[1] : 0;
  const uint32_t four = __funnelshift_r(low, high, (row + 8) % 8 * 4) & 0xffffu >> 4 * (4 - max(min(left, 4), 1));
  const uint32_t bytes = (four & 1) | (four & 1 << 4) << 4 | (four & 1 << 8) << 8 | (four & 1 << 12) << 12;
  const int64_t own_key = ((int64_t)w->batch * p->own_heads + w->own_head) * p->own_tiles * KEYS + w->own_row;
  const int go = s->exists && left > 0;
  void *const own_line = p->spent + own_key * 2 + warp * 32 + lane;
  or_into(go ? p->units + unit + row : own_line, go ? bytes * NAN_UNIT : 0);
}

/* A unit from its exponent; NAN_UNIT becomes Inf, and nobody looks at what comes of that. */
static __device__ __forceinline__ float unit_from(uint32_t exponent) { return __uint_as_float(exponent << 23); }

/* Half of a thread's floats, from `first` on, in units of their rows to this warp's block in shared memory. */
static __device__ __forceinline__ void store_share(uint32_t to, const float *dq, const float *unit, int first) {
#pragma unroll
  for (int i = first; i < first + DQ_FLOATS / 2; i += 4) {
    const int32_t x[4] = {__float2int_rn(dq[i] * unit[0]), __float2int_rn(dq[i + 1] * unit[0]),
                          __float2int_rn(dq[i + 2] * unit[1]), __float2int_rn(dq[i + 3] * unit[1])};
    store_shared_four(to + i / 4 * FOUR_BYTES, x);
  }
}

/* From there to the sums, if go. */
static __device__ __forceinline__ void send_share(int go, int32_t *sums, uint32_t from) {
  fence_async_shared();
  __syncwarp();
  bulk_add(go, sums, from, BLOCK_BYTES);
  bulk_commit();
}

#endif
