/*
 * varlen.c - the entry points of packed sequences: check, run.
 *
 * Lengths are public and are read here; no element of a tensor is.
 */
#include "check.h"
#include "cpu/attention_cpu.h"
#include "cpu/backward/backward_cpu.h"
#include "cuda/layout.h"
#include "error.h"
#include "families/fold/parts.h"
#include "families/forward/packed.h"
#include "families/tiles/params.h"

static int is_page_size(int64_t size) { return size == 16 || size == 32 || size == 64 || size == 128 || size == 256; }

dhp_status dhp_varlen_check(const dhp_varlen *args, int on_cuda, dhp_error *error) {
  const dhp_status status = dhp_check_packed(&args->packed, args->page_table != NULL, error);
  if (status != DHP_OK) return status;
  if (args->page_table && !is_page_size(args->packed.k.size[2]))
    return dhp_fail(error, DHP_UNSUPPORTED, "k: pages of %lld keys; supported: 16, 32, 64, 128, 256",
                    (long long)args->packed.k.size[2]);
  if (args->max_seqlen_q < 0 || args->max_seqlen_k < 0)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "max_seqlen_%s: %lld; supported: not negative",
                    args->max_seqlen_q < 0 ? "q" : "k",
                    (long long)(args->max_seqlen_q < 0 ? args->max_seqlen_q : args->max_seqlen_k));
  if (args->page_table && args->leftpad_k)
    return dhp_fail(error, DHP_UNSUPPORTED,
                    "leftpad_k: given beside page_table; supported: None, because a sequence may begin with any page");
  if (on_cuda) {
    dhp_packed_plan plan;
    return dhp_plan_packed(args, &plan, error);
  }
  return dhp_check_cpu_head_dims(&args->packed, error);
}

/* Of q or k: begins at 0, ascends by no more than `most`, ends within the rows there are. */
static dhp_status check_cumulative(const char *name, const int32_t *lengths, int64_t sequences, int64_t rows,
                                   int64_t most, dhp_error *error) {
  if (lengths[0] != 0)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "cu_seqlens_%s: begins with %d; supported: 0", name, (int)lengths[0]);
  for (int64_t b = 0; b < sequences; b++) {
    const int64_t length = (int64_t)lengths[b + 1] - lengths[b];
    if (length < 0)
      return dhp_fail(error, DHP_INVALID_ARGUMENT, "cu_seqlens_%s: %d behind %d, at %lld; supported: ascending numbers",
                      name, (int)lengths[b + 1], (int)lengths[b], (long long)b + 1);
    if (length > most)
      return dhp_fail(error, DHP_INVALID_ARGUMENT,
                      "max_seqlen_%s: %lld, but sequence %lld has %lld rows; supported: no less than the longest", name,
                      (long long)most, (long long)b, (long long)length);
  }
  if (lengths[sequences] > rows)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "cu_seqlens_%s: ends with %d, but %s has %lld rows", name,
                    (int)lengths[sequences], name, (long long)rows);
  return DHP_OK;
}

/* Where the keys that count lie: every entry of theirs is a page. */
static dhp_status check_pages(const dhp_varlen *args, int64_t b, int64_t used, dhp_error *error) {
  const int64_t size = args->packed.k.size[2], pages = args->packed.k.size[0];
  for (int64_t i = 0; i * size < used; i++) {
    const int32_t page = args->page_table[b * args->page_table_width + i];
    if (page < 0 || page >= pages)
      return dhp_fail(error, DHP_INVALID_ARGUMENT,
                      "page_table: %d at [%lld, %lld]; supported: a page of k and v, which have %lld", (int)page,
                      (long long)b, (long long)i, (long long)pages);
  }
  return DHP_OK;
}

static dhp_status check_lengths(const dhp_varlen *args, dhp_error *error) {
  const int64_t n = args->sequences, most_keys = args->seqused_k ? INT32_MAX : args->max_seqlen_k;
  dhp_status status = check_cumulative("q", args->cu_seqlens_q, n, args->packed.q.size[2], args->max_seqlen_q, error);
  if (status == DHP_OK && !args->page_table)
    status = check_cumulative("k", args->cu_seqlens_k, n, args->packed.k.size[2], most_keys, error);
  for (int64_t b = 0; b < n && status == DHP_OK && args->seqused_k; b++) {
    const int64_t used = args->seqused_k[b];
    const int64_t room = args->page_table ? args->page_table_width * args->packed.k.size[2]
                                          : (int64_t)args->cu_seqlens_k[b + 1] - args->cu_seqlens_k[b];
    if (used < 0 || used > room)
      return dhp_fail(error, DHP_INVALID_ARGUMENT, "seqused_k: %lld for sequence %lld; supported: 0 to its %lld keys",
                      (long long)used, (long long)b, (long long)room);
    if (used > args->max_seqlen_k)
      return dhp_fail(error, DHP_INVALID_ARGUMENT,
                      "max_seqlen_k: %lld, but sequence %lld has %lld keys; supported: no less than the longest",
                      (long long)args->max_seqlen_k, (long long)b, (long long)used);
    if (args->page_table) status = check_pages(args, b, used, error);
  }
  for (int64_t b = 0; b < n && status == DHP_OK && args->leftpad_k; b++) {
    const int64_t keys = args->seqused_k ? args->seqused_k[b] : args->cu_seqlens_k[b + 1] - args->cu_seqlens_k[b];
    if (args->leftpad_k[b] < 0 || args->leftpad_k[b] > keys)
      status = dhp_fail(error, DHP_INVALID_ARGUMENT,
                        "leftpad_k: %d for sequence %lld; supported: 0 to the %lld keys up to its last",
                        (int)args->leftpad_k[b], (long long)b, (long long)keys);
  }
  return status;
}

dhp_status dhp_varlen_cpu(const dhp_varlen *args, const dhp_executor *executor, dhp_error *error) {
  dhp_status status = dhp_varlen_check(args, 0, error);
  if (status == DHP_OK) status = check_lengths(args, error);
  if (status != DHP_OK || args->packed.q.size[1] == 0 || args->packed.q.size[2] == 0) return status;
  return dhp_cpu_varlen(args, executor, error);
}

/* The list of query tiles, and parts of rows. */
static size_t workspace_bytes(const dhp_packed_plan *plan) {
  return (size_t)plan->entries * sizeof(dhp_listed_tile) + dhp_parts_bytes(plan->parts, plan->kernel->head_dim);
}

dhp_status dhp_varlen_cuda(const dhp_varlen *args, int device, void *stream, dhp_error *error) {
  dhp_packed_plan plan;
  dhp_status status = dhp_varlen_check(args, 1, error);
  if (status == DHP_OK) status = dhp_plan_packed(args, &plan, error);
  if (status != DHP_OK || !plan.kernel) return status;
  const char *const names[] = {"q", "k", "v", "out"};
  const dhp_tensor *const tensors[] = {&args->packed.q, &args->packed.k, &args->packed.v, &args->packed.out};
  status = dhp_cuda_check_layouts(names, tensors, sizeof tensors / sizeof *tensors, error);
  if (status != DHP_OK) return status;
  if (!args->workspace)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "workspace: NULL; expected %zu bytes, as dhp_varlen_workspace says",
                    workspace_bytes(&plan));
  return dhp_packed_launch(args, &plan, device, stream, error);
}

size_t dhp_varlen_workspace(const dhp_varlen *args, int on_cuda) {
  dhp_packed_plan plan;
  dhp_error ignored;
  if (!on_cuda || dhp_plan_packed(args, &plan, &ignored) != DHP_OK) return 0;
  return plan.kernel ? workspace_bytes(&plan) : 0;
}

/* ---- gradients -------------------------------------------------------------------------------------------------- */

dhp_status dhp_varlen_backward_check(const dhp_varlen_backward *args, int on_cuda, dhp_error *error) {
  if (args->forward.page_table)
    return dhp_fail(error, DHP_UNSUPPORTED,
                    "page_table: given, but a cache in pages has no gradients; supported: cu_seqlens_k in its place");
  const dhp_backward packed = {.forward = args->forward.packed,
                               .grad_out = args->grad_out,
                               .grad_lse = args->grad_lse,
                               .dq = args->dq,
                               .dk = args->dk,
                               .dv = args->dv};
  const dhp_status status = dhp_check_packed_gradients(&packed, error);
  if (status == DHP_OK && on_cuda)
    return dhp_fail(error, DHP_UNSUPPORTED,
                    "cu_seqlens_q: gradients of packed sequences; supported on CUDA: none, but a call of attention for "
                    "each length");
  return status == DHP_OK ? dhp_varlen_check(&args->forward, on_cuda, error) : status;
}

dhp_status dhp_varlen_backward_cpu(const dhp_varlen_backward *args, const dhp_executor *executor, dhp_error *error) {
  dhp_status status = dhp_varlen_backward_check(args, 0, error);
  if (status == DHP_OK) status = check_lengths(&args->forward, error);
  return status == DHP_OK ? dhp_cpu_varlen_backward(args, executor, error) : status;
}
