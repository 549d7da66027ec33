/*
 * varlen_cpu.c - packed sequences on the CPU: each is a call of its own, over tensors that begin at its first rows.
 *
 * Nothing here reads an element of q, k or v.
 */
#include <stdlib.h>

#include "../../error.h"
#include "../attention_cpu.h"
#include "../float64/float64.h"
#include "../split.h"

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

/* Where work of a sequence begins: as the fields of dhp_cpu_split, of all before it. */
typedef dhp_cpu_split beginning;

typedef struct varlen_work {
  const dhp_cpu_kernel *kernel;
  const dhp_varlen *args;
  const beginning *first; /* of sequence b, for all sequences and what is behind them; then of nothing more */
  dhp_cpu_partial *partials;
} varlen_work;

/* The last sequence of which a piece, or a fold, begins no later: the one that has it. */
static int64_t sequence_at(const varlen_work *work, int64_t index, int is_fold) {
  int64_t low = 0, high = work->args->sequences + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if ((is_fold ? work->first[middle].folds : work->first[middle].pieces) <= index)
      low = middle;
    else
      high = middle;
  }
  return low;
}

static dhp_cpu_call call_of(const varlen_work *work, const sequence *part, int64_t b) {
  return (dhp_cpu_call){.kernel = work->kernel,
                        .args = &part->args,
                        .mask = &part->mask,
                        .places = part->places,
                        .partials = work->partials + work->first[b].partials};
}

static void attend_piece(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const varlen_work *const work = context;
  const int64_t b = sequence_at(work, index, 0);
  const sequence part = sequence_of(work->args, b);
  const dhp_cpu_call call = call_of(work, &part, b);
  dhp_cpu_attend_piece(&call, index - work->first[b].pieces, scratch);
}

static void fold_pieces(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const varlen_work *const work = context;
  const int64_t b = sequence_at(work, index, 1);
  const sequence part = sequence_of(work->args, b);
  const dhp_cpu_call call = call_of(work, &part, b);
  dhp_cpu_fold_pieces(&call, index - work->first[b].folds, scratch);
}

/* Pieces and folds of all sequences, in that order, with what is between them. */
static dhp_status run_all(varlen_work *work, dhp_cpu_split all, const dhp_executor *executor, dhp_error *error) {
  const dhp_varlen *const args = work->args;
  const dhp_status status = dhp_cpu_partials_new(all.partials, &work->partials, error);
  if (status != DHP_OK) return status;
  const dhp_cpu_work steps[] = {{attend_piece, work, all.pieces}, {fold_pieces, work, all.folds}};
  const int64_t rest = args->packed.q.size[2] - args->cu_seqlens_q[args->sequences];
  const int64_t queries = rest > args->max_seqlen_q ? rest : args->max_seqlen_q;
  const dhp_cpu_extent extent = dhp_cpu_forward_extent(&args->packed, queries, args->max_seqlen_k);
  const dhp_status ran = dhp_cpu_run(steps, 2, &extent, executor, error);
  dhp_cpu_partials_free(work->partials, all.partials);
  return ran;
}

dhp_status dhp_cpu_varlen_with(const dhp_cpu_kernel *kernel, const dhp_varlen *args, const dhp_executor *executor,
                               dhp_error *error) {
  const int64_t n = args->sequences + 1;
  beginning *const first = malloc((size_t)(n + 1) * sizeof *first);
  if (!first) return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for %lld lengths", (long long)n);
  first[0] = (beginning){0};
  for (int64_t b = 0; b < n; b++) {
    const sequence part = sequence_of(args, b);
    const dhp_cpu_split split = dhp_cpu_split_of(&part.args, &part.mask);
    first[b + 1] = (beginning){.pieces = first[b].pieces + split.pieces,
                               .partials = first[b].partials + split.partials,
                               .folds = first[b].folds + split.folds};
  }
  varlen_work work = {.kernel = kernel, .args = args, .first = first};
  const dhp_status status = run_all(&work, first[n], executor, error);
  free(first);
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
