/* sequence.c - see sequence.h. Nothing here reads an element of a tensor. */
#include "sequence.h"

#include <stddef.h>

static int64_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2; }

dhp_tensor dhp_cpu_rows_from(const dhp_tensor *t, int64_t first, int64_t count) {
  dhp_tensor part = *t;
  if (t->data) part.data = (char *)t->data + first * t->stride[2] * element_size(t->dtype);
  part.size[2] = count;
  return part;
}

const void *dhp_cpu_lse_from(const void *lse, dhp_dtype dtype, int64_t first) {
  return lse ? (const char *)lse + first * (dtype == DHP_FLOAT64 ? 8 : 4) : NULL;
}

dhp_key_range dhp_cpu_keys_of(const dhp_varlen *args, int64_t b) {
  const int64_t end = args->seqused_k ? args->seqused_k[b] : args->cu_seqlens_k[b + 1] - args->cu_seqlens_k[b];
  return (dhp_key_range){args->leftpad_k ? args->leftpad_k[b] : 0, end};
}

dhp_cpu_sequence dhp_cpu_sequence_of(const dhp_varlen *args, int64_t b) {
  const dhp_attention *const packed = &args->packed;
  const int is_sequence = b < args->sequences;
  const int64_t first = args->cu_seqlens_q[b], last = is_sequence ? args->cu_seqlens_q[b + 1] : packed->q.size[2];
  const dhp_key_range counted = is_sequence ? dhp_cpu_keys_of(args, b) : (dhp_key_range){0, 0};
  const int64_t queries = last - first, keys = counted.last - counted.first;

  dhp_cpu_sequence found = {.args = *packed, .places.lse_pitch = packed->q.size[2], .first_query = first};
  found.args.q = dhp_cpu_rows_from(&packed->q, first, queries);
  found.args.out = dhp_cpu_rows_from(&packed->out, first, queries);
  found.args.lse = (void *)dhp_cpu_lse_from(packed->lse, packed->q.dtype, first);
  if (!is_sequence) found.args.sinks = NULL; /* rows of none have no term at all: their lse is -inf */
  if (args->page_table) {
    found.places.pages = args->page_table + b * args->page_table_width;
  } else {
    found.first_key = args->cu_seqlens_k[b] + counted.first;
    found.args.k = dhp_cpu_rows_from(&packed->k, found.first_key, keys);
    found.args.v = dhp_cpu_rows_from(&packed->v, found.first_key, keys);
  }
  found.mask = dhp_mask_along(packed, queries, keys, args->is_bottom_right ? keys - queries : 0);
  return found;
}
