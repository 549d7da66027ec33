/*
 * softmax.cuh - the online softmax of a tile of scores in registers (Milakov and Gimelshein, 2018; Dao et al., 2022).
 *
 * Before this header: SCORES and OUTPUTS, the floats of S and of O that a thread holds, and THREAD_ROWS, how many of
 * the two rows that wgmma gives a thread it computes; and kernel_params, the family's parameters, which hold those of
 * softmax_params.h.
 *
 * CT: scores meet fused multiply-adds, selects by public columns, max, ex2 and quad shuffles with constant lanes.
 */
#ifndef DHP_SOFTMAX_CUH
#define DHP_SOFTMAX_CUH

#include "softmax_scale.cuh"

/*
 * Running statistics of the rows a thread shares with its quad: the wgmma accumulator gives thread l of a warp the rows
 * l / 4 and l / 4 + 8, columns 2 (l % 4) + {0, 1} of each block of eight. With 32 rows to a warpgroup the second row is
 * unused: its scores are never looked at, its probabilities 0.
 *
 * A shift is finite, and so is its product with the scale: -inf minus -inf, in a row whose scores are all masked so
 * far, would be NaN. A score of +inf still gives a sum of +inf, and the row inf / inf.
 */
typedef struct row_stats {
  float shift[THREAD_ROWS];   /* subtracted from the raw scores: their maximum so far, within +-highest_score */
  float sum[THREAD_ROWS];     /* of exp2(scaled score - scaled shift), this thread's columns only */
  float rescale[THREAD_ROWS]; /* what the last step multiplied sum by, and O still has to be multiplied by */
} row_stats;

/* How scores that a row does not see are hidden: known at compile time, or a choice of two by public positions, which
 * becomes a branch. By bits, of which one instruction makes several predicates, it takes fewer instructions than two
 * comparisons for each score, but no fewer than one. */
typedef enum masking { UNMASKED, COMPARED, BY_BITS } masking;

/* A bit for each column of a row that a thread has, two of every eight: 1 if it lies before this one. */
static __device__ __forceinline__ uint32_t columns_before(int end) {
  const int from_0 = max(end, 0);
  return __funnelshift_lc(~0u, 0, from_0 / 8 * 2 + min(from_0 % 8, 2)); /* up to 32 bits of ones */
}

/*
 * How ptxas is led to an order of instructions, a compile-time constant at every call: the bits are the same.
 *
 * It leaves to the end what nothing waits for: the factors of rescaling, and with them the multiplications of O, which
 * then come after the exponentials, whose unit is the narrowest, instead of between them. So exponentials can be made
 * to wait for factors, of their own row or of both: they add 0 times a factor, which is finite.
 */
typedef struct softmax_order {
  int maxima;        /* of a row that are found side by side: 1 or 2 */
  int waits_from[2]; /* from which of a row's scores on they wait, in eighths; 8: none does */
  int waits_for_both;
} softmax_order;

#define ANY_ORDER ((softmax_order){1, {8, 8}, 0})

/*
 * The first half of a step, over so many scores of a thread, those of all columns or of a half: masks s, and shift and
 * rescale move on; scale[r] is that of row r. `limit[r]` is the last visible column of row r, counted from this
 * thread's first one here, first[r] the first one, if `first` is not null; read only if masked.
 */
template <int scores = SCORES>
static __device__ __forceinline__ void softmax_shift(float *s, row_stats *stats, float *scale, const kernel_params *p,
                                                     const int *limit, const int *first, masking masked,
                                                     softmax_order order) {
  if (masked == COMPARED) {
#pragma unroll
    for (int i = 0; i < scores; i++) {
      const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
      if (r < THREAD_ROWS) s[i] = column <= limit[r] ? s[i] : -INFINITY;
      if (r < THREAD_ROWS && first) s[i] = column >= first[r] ? s[i] : -INFINITY;
    }
  }
  if (masked == BY_BITS) {
    uint32_t visible[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++)
      visible[r] = columns_before(limit[r] + 1) & ~columns_before(first[r]);
#pragma unroll
    for (int i = 0; i < scores; i++) {
      const int column = i / 4 * 2 + i % 2, r = i / 2 % 2;
      if (r < THREAD_ROWS) s[i] = visible[r] >> column & 1 ? s[i] : -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; r++) {
    float top[2] = {fmaxf(fmaxf(stats->shift[r], s[2 * r]), s[2 * r + 1])};
    if (order.maxima == 2) top[1] = fmaxf(s[4 + 2 * r], s[5 + 2 * r]);
#pragma unroll
    for (int i = 4 * order.maxima; i < scores; i += 4) {
      float *const one = top + i / 4 % order.maxima;
      *one = fmaxf(*one, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    }
    float shift = fminf(order.maxima == 2 ? fmaxf(top[0], top[1]) : top[0], p->highest_score);
    shift = fmaxf(shift, __shfl_xor_sync(FULL_MASK, shift, 1));
    shift = fmaxf(shift, __shfl_xor_sync(FULL_MASK, shift, 2));
    scale[r] = scale_of(shift, p);
    stats->rescale[r] = dhp_ct_exp2(fmaf(stats->shift[r], scale[r], -(shift * scale[r])));
    stats->shift[r] = shift;
  }
}

/* The second half: s becomes exp2(scale (s - shift)), and sum moves on. */
template <int scores = SCORES>
static __device__ __forceinline__ void softmax_exponentials(float *s, row_stats *stats, const float *scale,
                                                            softmax_order order) {
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; r++) {
    const float scaled = stats->shift[r] * scale[r];
    float late = scaled;
    if (order.waits_for_both) late = fmaf(stats->rescale[THREAD_ROWS - 1 - r], 0.f, late);
    late = fmaf(stats->rescale[r], 0.f, late);
    float sum = 0.f; /* in fact it begins with the first two: 0 + x would be an addition */
#pragma unroll
    for (int i = 2 * r; i < scores; i += 4) {
      const float by = i < scores / 8 * order.waits_from[r] ? scaled : late;
      s[i] = dhp_ct_exp2(fmaf(s[i], scale[r], -by));
      s[i + 1] = dhp_ct_exp2(fmaf(s[i + 1], scale[r], -by));
      sum = i == 2 * r ? s[i] + s[i + 1] : sum + (s[i] + s[i + 1]);
    }
    stats->sum[r] = fmaf(stats->sum[r], stats->rescale[r], sum);
  }
}

/* The accumulator layout of S is the A operand layout of P: packing neighbours is all it takes. */
template <int scores = SCORES> static __device__ __forceinline__ void pack_probabilities(uint32_t *p, const float *s) {
#pragma unroll
  for (int i = 0; i < scores; i += 2)
    p[i / 2] = i / 2 % 2 < THREAD_ROWS ? pack_two(s[i], s[i + 1]) : 0;
}

static __device__ __forceinline__ void rescale_output(float *o, const float *rescale) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++)
    if (i / 2 % 2 < THREAD_ROWS) o[i] *= rescale[i / 2 % 2];
}

#endif
