/*
 * varlen_backward_cpu.c - the gradients of packed sequences on the CPU: each is a call of its own, and so are the keys
 * that do not count, which no query sees.
 *
 * Nothing here reads an element of a tensor.
 */
#include "../backward/backward_cpu.h"
#include "../backward/calls.h"
#include "../float64/float64.h"
#include "sequence.h"

/*
 * The keys that do not count between those of sequence b - 1 and those of sequence b: behind seqused_k, and leftpad_k;
 * of the one behind the last, also those that belong to none.
 */
static dhp_cpu_sequence idle_keys(const dhp_varlen *args, int64_t b) {
  const dhp_attention *const packed = &args->packed;
  const int64_t first = b > 0 ? args->cu_seqlens_k[b - 1] + dhp_cpu_keys_of(args, b - 1).last : 0;
  const int64_t last = b < args->sequences ? args->cu_seqlens_k[b] + dhp_cpu_keys_of(args, b).first : packed->k.size[2];
  const int64_t keys = last - first;
  dhp_cpu_sequence found = {.args = *packed, .places.lse_pitch = packed->q.size[2], .first_key = first};
  found.args.q = dhp_cpu_rows_from(&packed->q, 0, 0);
  found.args.out = dhp_cpu_rows_from(&packed->out, 0, 0);
  found.args.k = dhp_cpu_rows_from(&packed->k, first, keys);
  found.args.v = dhp_cpu_rows_from(&packed->v, first, keys);
  found.mask = dhp_mask_along(packed, 0, keys, 0);
  return found;
}

/* The sequences and the query rows that belong to none; then the keys that do not count. */
static int64_t calls_of(const dhp_varlen *args) { return 2 * (args->sequences + 1); }

static dhp_cpu_gradient_call call_at(const void *context, int64_t index) {
  const dhp_varlen_backward *const args = context;
  const int64_t n = args->forward.sequences + 1;
  const dhp_cpu_sequence part =
      index < n ? dhp_cpu_sequence_of(&args->forward, index) : idle_keys(&args->forward, index - n);
  const int64_t queries = part.args.q.size[2], keys = part.args.k.size[2];
  return (dhp_cpu_gradient_call){
      .args.forward = part.args,
      .args.grad_out = dhp_cpu_rows_from(&args->grad_out, part.first_query, queries),
      .args.grad_lse = dhp_cpu_lse_from(args->grad_lse, part.args.q.dtype, part.first_query),
      .args.dq = dhp_cpu_rows_from(&args->dq, part.first_query, queries),
      .args.dk = dhp_cpu_rows_from(&args->dk, part.first_key, keys),
      .args.dv = dhp_cpu_rows_from(&args->dv, part.first_key, keys),
      .mask = part.mask,
      .lse_pitch = part.places.lse_pitch,
      .first_lse_row = part.first_query,
  };
}

dhp_status dhp_cpu_varlen_backward_with(const dhp_cpu_kernel *kernel, const dhp_varlen_backward *args,
                                        const dhp_executor *executor, dhp_error *error) {
  const dhp_tensor *const q = &args->forward.packed.q;
  const dhp_cpu_gradient_calls calls = {call_at, args, calls_of(&args->forward), q->size[1] * q->size[2]};
  return dhp_cpu_gradients_of_calls(kernel, &calls, executor, error);
}

dhp_status dhp_cpu_varlen_backward(const dhp_varlen_backward *args, const dhp_executor *executor, dhp_error *error) {
  if (args->forward.packed.q.dtype == DHP_FLOAT64) {
    for (int64_t i = 0; i < calls_of(&args->forward); i++) {
      const dhp_cpu_gradient_call call = call_at(args, i);
      dhp_float64_backward(&call.args, &call.mask, call.lse_pitch, executor);
    }
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_varlen_backward_with(&kernels[0], args, executor, error);
}
