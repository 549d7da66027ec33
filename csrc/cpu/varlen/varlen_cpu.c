/*
 * varlen_cpu.c - packed sequences on the CPU: each is a call of its own.
 *
 * Nothing here reads an element of q, k or v.
 */
#include <stdlib.h>

#include "../../error.h"
#include "../attention_cpu.h"
#include "../float64/float64.h"
#include "../split.h"
#include "sequence.h"

/* ---- work ------------------------------------------------------------------------------------------------------ */

typedef struct varlen_work {
  const dhp_cpu_kernel *kernel;
  const dhp_varlen *args;
  /* Of sequence b, for all sequences and what is behind them, then the number of all: as in dhp_cpu_split. */
  int64_t *first_piece, *first_partial, *first_fold;
  dhp_cpu_partial *partials;
} varlen_work;

/* Piece or fold `index` of all, by the sequence that it is of. */
static void run_part(const varlen_work *work, const int64_t *first,
                     void (*part_of)(const void *call, int64_t index, dhp_cpu_scratch *scratch), int64_t index,
                     dhp_cpu_scratch *scratch) {
  const int64_t b = dhp_cpu_call_at(first, work->args->sequences + 1, index);
  const dhp_cpu_sequence part = dhp_cpu_sequence_of(work->args, b);
  const dhp_cpu_call call = {.kernel = work->kernel,
                             .args = &part.args,
                             .mask = &part.mask,
                             .places = part.places,
                             .partials = work->partials + work->first_partial[b]};
  part_of(&call, index - first[b], scratch);
}

static void attend_piece(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const varlen_work *const work = context;
  run_part(work, work->first_piece, dhp_cpu_attend_piece, index, scratch);
}

static void fold_pieces(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const varlen_work *const work = context;
  run_part(work, work->first_fold, dhp_cpu_fold_pieces, index, scratch);
}

static void lay_out(varlen_work *work, int64_t n) {
  work->first_piece[0] = work->first_partial[0] = work->first_fold[0] = 0;
  for (int64_t b = 0; b < n; b++) {
    const dhp_cpu_sequence part = dhp_cpu_sequence_of(work->args, b);
    const dhp_cpu_split split = dhp_cpu_split_of(&part.args, &part.mask);
    work->first_piece[b + 1] = work->first_piece[b] + split.pieces;
    work->first_partial[b + 1] = work->first_partial[b] + split.partials;
    work->first_fold[b + 1] = work->first_fold[b] + split.folds;
  }
}

/* Pieces and folds of all sequences, in that order, with what is between them. */
static dhp_status run_all(varlen_work *work, int64_t n, const dhp_executor *executor, dhp_error *error) {
  const dhp_varlen *const args = work->args;
  const int64_t partials = work->first_partial[n];
  const dhp_status status = dhp_cpu_partials_new(partials, &work->partials, error);
  if (status != DHP_OK) return status;
  const dhp_cpu_work steps[] = {{attend_piece, work, work->first_piece[n]}, {fold_pieces, work, work->first_fold[n]}};
  const int64_t rest = args->packed.q.size[2] - args->cu_seqlens_q[args->sequences];
  const int64_t queries = rest > args->max_seqlen_q ? rest : args->max_seqlen_q;
  const dhp_cpu_extent extent = dhp_cpu_forward_extent(&args->packed, queries, args->max_seqlen_k);
  const dhp_status ran = dhp_cpu_run(steps, 2, &extent, executor, error);
  dhp_cpu_partials_free(work->partials, partials);
  return ran;
}

dhp_status dhp_cpu_varlen_with(const dhp_cpu_kernel *kernel, const dhp_varlen *args, const dhp_executor *executor,
                               dhp_error *error) {
  const int64_t n = args->sequences + 1;
  int64_t *const first = malloc(3 * (size_t)(n + 1) * sizeof *first);
  if (!first) return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for %lld lengths", (long long)n);
  varlen_work work = {.kernel = kernel,
                      .args = args,
                      .first_piece = first,
                      .first_partial = first + n + 1,
                      .first_fold = first + 2 * (n + 1)};
  lay_out(&work, n);
  const dhp_status status = run_all(&work, n, executor, error);
  free(first);
  return status;
}

dhp_status dhp_cpu_varlen(const dhp_varlen *args, const dhp_executor *executor, dhp_error *error) {
  if (args->packed.q.dtype == DHP_FLOAT64) {
    for (int64_t b = 0; b <= args->sequences; b++) {
      const dhp_cpu_sequence part = dhp_cpu_sequence_of(args, b);
      dhp_float64_forward(&part.args, &part.mask, &part.places, executor);
    }
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_varlen_with(&kernels[0], args, executor, error);
}
