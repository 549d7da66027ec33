/*
 * varlen_cpu.c - packed sequences on the CPU: each is a call of its own, over tensors that begin at its first rows.
 *
 * Nothing here reads an element of q, k or v.
 */
#include <stdlib.h>

#include "../../error.h"
#include "../attention_cpu.h"
#include "../float64/float64.h"
#include "../tile.h"

/* One sequence as a call. */
typedef struct sequence {
  dhp_attention args;
  dhp_mask mask;
  dhp_cpu_places places;
} sequence;

static int64_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2; }

/* Rows [first, first + count) of every head. */
static dhp_tensor rows_of(const dhp_tensor *t, int64_t first, int64_t count) {
  dhp_tensor part = *t;
  part.data = (char *)t->data + first * t->stride[2] * element_size(t->dtype);
  part.size[2] = count;
  return part;
}

/* Of the keys of sequence b: from the first that counts up to the end of those that do. */
static dhp_key_range keys_of(const dhp_varlen *args, int64_t b) {
  const int64_t end = args->seqused_k ? args->seqused_k[b] : args->cu_seqlens_k[b + 1] - args->cu_seqlens_k[b];
  return (dhp_key_range){args->leftpad_k ? args->leftpad_k[b] : 0, end};
}

/* The one behind the last has the rows that belong to none, and no key. */
static sequence sequence_of(const dhp_varlen *args, int64_t b) {
  const dhp_attention *const packed = &args->packed;
  const int is_sequence = b < args->sequences;
  const int64_t first = args->cu_seqlens_q[b], last = is_sequence ? args->cu_seqlens_q[b + 1] : packed->q.size[2];
  const dhp_key_range counted = is_sequence ? keys_of(args, b) : (dhp_key_range){0, 0};
  const int64_t queries = last - first, keys = counted.last - counted.first;

  sequence found = {.args = *packed, .places.lse_pitch = packed->q.size[2]};
  found.args.q = rows_of(&packed->q, first, queries);
  found.args.out = rows_of(&packed->out, first, queries);
  if (args->page_table) {
    found.places.pages = args->page_table + b * args->page_table_width;
  } else {
    found.args.k = rows_of(&packed->k, args->cu_seqlens_k[b] + counted.first, keys);
    found.args.v = rows_of(&packed->v, args->cu_seqlens_k[b] + counted.first, keys);
  }
  const int64_t lse_size = packed->q.dtype == DHP_FLOAT64 ? 8 : 4;
  if (packed->lse) found.args.lse = (char *)packed->lse + first * lse_size;
  found.mask = dhp_mask_along(packed, queries, keys, args->is_bottom_right ? keys - queries : 0);
  return found;
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

typedef struct varlen_work {
  const dhp_cpu_kernel *kernel;
  const dhp_varlen *args;
  const int64_t *first_unit; /* of sequence b, for all sequences and what is behind them; then the number of all */
} varlen_work;

/* The sequence of a unit: the last that begins no later, which has one. */
static int64_t sequence_at(const varlen_work *work, int64_t unit) {
  int64_t low = 0, high = work->args->sequences + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (work->first_unit[middle] <= unit)
      low = middle;
    else
      high = middle;
  }
  return low;
}

static void attend_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const varlen_work *const work = context;
  const int64_t b = sequence_at(work, index);
  const sequence part = sequence_of(work->args, b);
  const int64_t unit = index - work->first_unit[b];
  const dhp_cpu_rows rows = dhp_cpu_unit(&part.args, &part.mask, &part.places, unit);
  work->kernel->attend(&rows, scratch);
}

dhp_status dhp_cpu_varlen_with(const dhp_cpu_kernel *kernel, const dhp_varlen *args, const dhp_executor *executor,
                               dhp_error *error) {
  const int64_t n = args->sequences + 1;
  int64_t *const first_unit = malloc((size_t)(n + 1) * sizeof *first_unit);
  if (!first_unit) return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for %lld lengths", (long long)n);
  first_unit[0] = 0;
  for (int64_t b = 0; b < n; b++) {
    const sequence part = sequence_of(args, b);
    first_unit[b + 1] = first_unit[b] + dhp_cpu_units(&part.args);
  }
  const varlen_work context = {kernel, args, first_unit};
  const dhp_cpu_work work = {attend_tile, &context, first_unit[n]};
  const int64_t rest = args->packed.q.size[2] - args->cu_seqlens_q[args->sequences];
  const dhp_cpu_extent extent = {.queries = rest > args->max_seqlen_q ? rest : args->max_seqlen_q,
                                 .keys = args->max_seqlen_k,
                                 .head_dim = dhp_cpu_most_dims(&args->packed)};
  const dhp_status status = dhp_cpu_run(&work, 1, &extent, executor, error);
  free(first_unit);
  return status;
}

dhp_status dhp_cpu_varlen(const dhp_varlen *args, const dhp_executor *executor, dhp_error *error) {
  if (args->packed.q.dtype == DHP_FLOAT64) {
    for (int64_t b = 0; b <= args->sequences; b++) {
      const sequence part = sequence_of(args, b);
      dhp_float64_forward(&part.args, &part.mask, &part.places, executor);
    }
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_varlen_with(&kernels[0], args, executor, error);
}
