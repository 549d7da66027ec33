/*
 * plan.c - public shape to launch: which kernel, how many CTAs, in which order.
 *
 * A plan may choose how many query rows share a CTA, because that changes no output bit; it may not choose another key
 * tile for a head_dim, because that would. It never looks at a value.
 */
#include "plan.h"

#include "attention.h"
#include "error.h"
#include "kernels/kernel_table.h"

enum {
  /* Streaming multiprocessors of an H100 or H200 SXM. Only speed depends on it. */
  MULTIPROCESSORS = 132,
  /* Keys and values that are meant to stay in the 50 MB L2 at a time, beside queries and outputs passing through. */
  L2_BUDGET_BYTES = 32 << 20,
  /* The x dimension of a CUDA grid. */
  MAX_GRID = INT32_MAX
};

int dhp_kernel_count(void) { return dhp_kernel_table_size; }

const dhp_kernel_info *dhp_kernel(int index) {
  return index >= 0 && index < dhp_kernel_table_size ? &dhp_kernel_table[index] : NULL;
}

int dhp_cuda_max_head_dim(void) {
  int most = 0;
  for (int i = 0; i < dhp_kernel_table_size; i++)
    if (dhp_kernel_table[i].head_dim > most) most = dhp_kernel_table[i].head_dim;
  return most;
}

int32_t dhp_clamp_offset(const dhp_attention *args) {
  const int64_t low = -args->q.size[2], high = args->k.size[2];
  const int64_t offset = args->causal_offset;
  return (int32_t)(offset < low ? low : offset > high ? high : offset);
}

int64_t dhp_keys_seen(const dhp_attention *args) {
  if (!args->is_causal) return args->k.size[2];
  const int64_t seen = args->q.size[2] + dhp_clamp_offset(args);
  return seen < args->k.size[2] ? seen : args->k.size[2];
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Smallest head_dim among the kernels of this dtype that holds D; 0 if none does. */
static int kernel_head_dim(dhp_dtype dtype, int64_t head_dim) {
  int best = 0;
  for (int i = 0; i < dhp_kernel_table_size; i++) {
    const dhp_kernel_info *const kernel = &dhp_kernel_table[i];
    if (kernel->dtype == dtype && kernel->head_dim >= head_dim && (best == 0 || kernel->head_dim < best))
      best = kernel->head_dim;
  }
  return best;
}

/*
 * The kernel with the most query rows a CTA that still gives every multiprocessor one: more rows read k and v less
 * often. If even the smallest tile leaves some idle, the smallest one.
 */
static const dhp_kernel_info *choose_kernel(dhp_dtype dtype, int head_dim, int64_t heads, int64_t seqlen_q) {
  const dhp_kernel_info *best = NULL;
  for (int i = 0; i < dhp_kernel_table_size; i++) {
    const dhp_kernel_info *const kernel = &dhp_kernel_table[i];
    if (kernel->dtype != dtype || kernel->head_dim != head_dim) continue;
    const int fills = heads * ceil_div(seqlen_q, kernel->tile_q) >= MULTIPROCESSORS;
    if (!best || (kernel->tile_q > best->tile_q ? fills : !fills && kernel->tile_q < best->tile_q)) best = kernel;
  }
  return best;
}

dhp_status dhp_plan_attention(const dhp_attention *args, dhp_plan *plan, dhp_error *error) {
  *plan = (dhp_plan){0};
  const dhp_status status = dhp_validate(args, error);
  if (status != DHP_OK) return status;

  const int64_t *const q = args->q.size, *const k = args->k.size;
  if (args->q.dtype == DHP_FLOAT32)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: dtype float32; supported on CUDA: float16, bfloat16");
  if (dhp_kernel_table_size == 0)
    return dhp_fail(error, DHP_NO_GPU, "this build has no GPU kernels: nvcc was not found when it was built");
  const int head_dim = kernel_head_dim(args->q.dtype, q[3]);
  if (head_dim == 0 || q[3] % 8 != 0)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: head_dim %lld; supported on CUDA: a multiple of 8 up to %d",
                    (long long)q[3], dhp_cuda_max_head_dim());
  if (q[0] == 0 || q[1] == 0 || q[2] == 0) return DHP_OK;

  /* batch * heads first: each factor below 2^31 or the product of the checks below would overflow int64 */
  if (q[0] > MAX_GRID || q[1] > MAX_GRID || q[0] * q[1] > MAX_GRID)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: batch %lld times heads %lld; supported on CUDA: up to %d together",
                    (long long)q[0], (long long)q[1], MAX_GRID);
  const int64_t heads = q[0] * q[1];
  const dhp_kernel_info *const kernel = choose_kernel(args->q.dtype, head_dim, heads, q[2]);
  const int64_t q_tiles = ceil_div(q[2], kernel->tile_q);
  if (heads * q_tiles > MAX_GRID)
    return dhp_fail(error, DHP_UNSUPPORTED,
                    "q: %lld heads in the batch of %lld tiles of %d rows; supported on CUDA: up to %d tiles in all",
                    (long long)heads, (long long)q_tiles, kernel->tile_q, MAX_GRID);

  const int64_t kv_bytes_a_head = 2 * k[2] * kernel->head_dim * 2 + 1; /* + 1: never zero */
  const int64_t key_heads = L2_BUDGET_BYTES / kv_bytes_a_head;
  const int64_t group = (key_heads > 1 ? key_heads : 1) * (q[1] / k[1]);
  plan->kernel = kernel;
  plan->grid = heads * q_tiles;
  plan->q_tiles = q_tiles;
  plan->heads_per_group = (int)(group < heads ? group : heads);
  return DHP_OK;
}
