/*
 * split.c - see split.h. Nothing here reads an element of a tensor.
 */
#include "split.h"

#include <stdlib.h>

#include "../ct.h"
#include "../error.h"

/* The segments that are pieces of each unit; one: it is not split. All units of few rows have rows at one position. */
static int64_t segments_of(const dhp_attention *args, const dhp_mask *mask) {
  const int64_t queries = args->q.size[2];
  if (queries > DHP_CPU_FEW_ROWS) return 1;
  const dhp_key_range seen = {dhp_mask_row(mask, 0).first, dhp_mask_row(mask, queries - 1).last};
  if (seen.last - seen.first <= DHP_SEGMENT_KEYS) return 1;
  const dhp_segments segments = dhp_segments_of(seen);
  return segments.last - segments.first;
}

dhp_cpu_split dhp_cpu_split_of(const dhp_attention *args, const dhp_mask *mask) {
  const int64_t units = dhp_cpu_units(args), segments = units == 0 ? 1 : segments_of(args, mask);
  return segments == 1 ? (dhp_cpu_split){.pieces = units}
                       : (dhp_cpu_split){.pieces = units * segments, .partials = units * segments, .folds = units};
}

void dhp_cpu_attend_piece(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const dhp_cpu_call *const call = context;
  const int64_t segments = segments_of(call->args, call->mask);
  const dhp_cpu_rows rows = dhp_cpu_unit(call->args, call->mask, &call->places, index / segments);
  if (segments == 1)
    call->kernel->attend(&rows, scratch);
  else
    call->kernel->attend_segment(&rows, dhp_cpu_segments(&rows).first + index % segments, &call->partials[index],
                                 scratch);
}

void dhp_cpu_fold_pieces(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const dhp_cpu_call *const call = context;
  const dhp_cpu_rows rows = dhp_cpu_unit(call->args, call->mask, &call->places, index);
  call->kernel->fold_segments(&rows, &call->partials[index * segments_of(call->args, call->mask)], scratch);
}

/* ---- what lies between the two ---------------------------------------------------------------------------------- */

dhp_status dhp_cpu_partials_new(int64_t count, dhp_cpu_partial **partials, dhp_error *error) {
  const size_t alignment = 64, size = sizeof **partials; /* 64: a cache line, of which a partial is a multiple */
  *partials = NULL;
  if (count == 0) return DHP_OK;
  if ((uint64_t)count <= PTRDIFF_MAX / size) *partials = aligned_alloc(alignment, (size_t)count * size);
  if (!*partials)
    return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for %lld parts of rows, %zu bytes each", (long long)count,
                    size);
  return DHP_OK;
}

void dhp_cpu_partials_free(dhp_cpu_partial *partials, int64_t count) {
  if (partials) dhp_ct_wipe(partials, (size_t)count * sizeof *partials);
  free(partials);
}
