/*
 * reference.h - attention as its definition reads, in float64, one element at a time; and the problems to compare on.
 *
 * Shares no code with the kernel: its conversions of float16 and bfloat16 go through exact float64 arithmetic, and it
 * asks of a mask only the two bounds, element by element (test_masks.c compares them with the arguments of a call).
 */
#ifndef DHP_TEST_REFERENCE_H
#define DHP_TEST_REFERENCE_H

#include "../../../csrc/cpu/places.h"
#include "../../../csrc/mask.h"

/* ---- numbers --------------------------------------------------------------------------------------------------- */

double value_of(dhp_dtype dtype, uint32_t bits);
/* Nearest representable number, ties to even; NaN gives the canonical NaN. */
uint32_t nearest_bits(dhp_dtype dtype, double value);

/* ---- problems -------------------------------------------------------------------------------------------------- */

typedef enum memory_layout {
  CONTIGUOUS, /* [B, H, S, D] */
  TRANSPOSED, /* [B, S, H, D] seen as [B, H, S, D] */
  GAPS,       /* rows and heads with unused elements between them */
  EXPANDED    /* q without a head stride, k and v without a batch stride */
} memory_layout;

typedef struct shape {
  int64_t batch, heads, key_heads, queries, keys, head_dim;
  int is_causal;
  int64_t causal_offset;
} shape;

/* Memory behind a tensor, of exactly the elements its strides reach. */
typedef struct storage {
  unsigned char *data;
  size_t size; /* bytes */
} storage;

typedef struct problem {
  dhp_attention args;    /* lse is set; scale is 1 / sqrt(D) */
  dhp_mask mask;         /* the one that args ask for, until a test sets another */
  dhp_cpu_places places; /* no pages */
  storage q, k, v, out;
  float *lse; /* of float64 problems: double; see problem_lse */
  size_t lse_size;
} problem;

/* Normal random q, k, v; out and lse hold the byte 0xa5. */
problem problem_new(shape s, dhp_dtype dtype, memory_layout layout);
void problem_free(problem *p);
/* Fills out and lse with 0xa5 again. */
void problem_poison(problem *p);
/* Of out; see gaps_touched. */
int problem_gaps_touched(const problem *p);

double get(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d);
void set(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d, double value);
uint32_t get_bits(const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d);

double problem_lse(const problem *p, int64_t row);

/* What problems are made of. A layout's tensor; exactly its memory, whose address it gets; normal random elements. */
dhp_tensor strided(int64_t b, int64_t h, int64_t s, int64_t d, dhp_dtype dtype, memory_layout layout);
storage storage_new(dhp_tensor *t);
void fill_normal(const dhp_tensor *t, storage memory);
/* Bytes of the memory that no element of the tensor covers and that are no longer 0xa5. */
int gaps_touched(const dhp_tensor *t, storage memory);
/* All elements as [B, H, S, D] in float64; the caller frees them. */
double *decode(const dhp_tensor *t);

/* 1 if query i may see key j. */
int is_visible(const dhp_mask *mask, int64_t i, int64_t j);

/* ---- comparison ------------------------------------------------------------------------------------------------ */

typedef struct comparison {
  double relative;    /* norm of (out - ref) over the norm of ref */
  double conditioned; /* the same over the norm of sum p |v|: fair where the terms of ref cancel */
  double lse;         /* largest |lse - ref| / max(1, |ref|) */
  int mismatches;     /* elements of out or lse of which one is NaN or infinite and the other is not the same */
} comparison;

/* What out and lse hold, against the definition. */
comparison compare(const problem *p);

#endif
