/*
 * workspace.c - the memory for parts of rows: what the library that was built says of it, and that it asks for it. No
 * kernel is launched, and no pointer followed.
 */
#include <string.h>

#include "../../../csrc/dhp_fa.h"
#include "check.h"

enum { HEADS = 4, KEY_HEADS = 2, BYTES_OF_TILE = 64 /* in a list: an entry of 16 words (tiles/params.h) */ };

static float anything[4]; /* aligned: layouts are checked before there is a workspace to be missed */

static dhp_tensor contiguous(int64_t heads, int64_t length, const dhp_kernel_info *kernel) {
  const int64_t d = kernel->head_dim;
  return (dhp_tensor){.data = (void *)((uintptr_t)anything & ~(uintptr_t)15),
                      .size = {1, heads, length, d},
                      .stride = {heads * length * d, length * d, d, 1},
                      .dtype = kernel->dtype};
}

static dhp_attention call_of(const dhp_kernel_info *kernel, int64_t queries, int64_t keys) {
  dhp_attention args = {.q = contiguous(HEADS, queries, kernel), .k = contiguous(KEY_HEADS, keys, kernel), .scale = 1.};
  args.out = args.q;
  args.v = args.k;
  return args;
}

static size_t bytes_of(int64_t parts, const dhp_kernel_info *kernel) {
  return (size_t)parts * ((size_t)kernel->head_dim + 2) * sizeof(float); /* O, shift and sum of each row */
}

/* Rows whose keys are of one segment need none. */
static void check_none(const dhp_attention *args, const char *what) {
  dhp_plan plan;
  dhp_error error = {""};
  const dhp_status status = dhp_plan_attention(args, &plan, &error);
  check(status == DHP_OK && plan.splits == 1 && plan.parts == 0 && dhp_attention_workspace(args, 1) == 0,
        "%s, head_dim %d, %d rows of %d keys: status %d, %d splits, %lld parts, %zu bytes", what, (int)args->q.size[3],
        (int)args->q.size[2], (int)args->k.size[2], (int)status, plan.splits, (long long)plan.parts,
        dhp_attention_workspace(args, 1));
}

/* Others do: a place for every row of a tile, of each item if their segments are items, else of each CTA. */
static void check_some(const dhp_attention *args, int *are_split) {
  dhp_plan plan;
  dhp_error error = {""};
  if (!check(dhp_plan_attention(args, &plan, &error) == DHP_OK, "%s", error.text)) return;
  const int64_t places = plan.splits > 1 ? plan.items : plan.grid;
  check(plan.parts == places * plan.kernel->tile_q && plan.parts > 0 &&
            dhp_attention_workspace(args, 1) == bytes_of(plan.parts, plan.kernel),
        "%s, %d rows of %d keys: %d splits, %lld parts, %zu bytes", plan.kernel->name, (int)args->q.size[2],
        (int)args->k.size[2], plan.splits, (long long)plan.parts, dhp_attention_workspace(args, 1));
  check(dhp_attention_workspace(args, 0) == 0, "on the CPU: %zu bytes", dhp_attention_workspace(args, 0));
  const dhp_status status = dhp_attention_cuda(args, 0, NULL, &error);
  check(status == DHP_INVALID_ARGUMENT && strncmp(error.text, "workspace: NULL", 15) == 0,
        "%s, without a workspace: status %d, \"%s\"", plan.kernel->name, (int)status, error.text);
  are_split[plan.splits > 1] = 1;
}

static void test_attention(const dhp_kernel_info *kernel) {
  static const int queries[] = {1, 3, 70, 30000};
  const int64_t segment = (int64_t)kernel->tile_k * kernel->segment_tiles;
  int are_split[2] = {0};
  for (int i = 0; i < (int)(sizeof queries / sizeof *queries); i++) {
    dhp_attention args = call_of(kernel, queries[i], segment);
    check_none(&args, "full");
    args.is_causal = 1;
    args.causal_offset = segment - queries[i];
    check_none(&args, "causal");
    args = call_of(kernel, queries[i], segment + 1);
    check_some(&args, are_split);
    args.is_causal = 1;
    args.causal_offset = segment + 1 - queries[i];
    check_some(&args, are_split);
    args = call_of(kernel, queries[i], 4 * segment - 7);
    check_some(&args, are_split);
  }
  check(are_split[0] && are_split[1], "%s: segments are always split, or never", kernel->name);
}

/* A window in `keys` keys of packed sequences, and whether rows have parts. */
static void check_window(dhp_varlen args, int64_t left, int64_t right, int is_causal, int64_t keys, int has_parts) {
  args.packed.is_windowed = 1;
  args.packed.window_left = left;
  args.packed.window_right = right;
  args.packed.is_causal = is_causal;
  args.max_seqlen_k = keys;
  dhp_packed_plan plan;
  dhp_error error = {""};
  if (!check(dhp_plan_packed(&args, &plan, &error) == DHP_OK && plan.kernel, "%s", error.text)) return;
  check((plan.parts > 0) == has_parts, "%s, window (%lld, %lld), causal %d, %lld keys: %lld parts", plan.kernel->name,
        (long long)left, (long long)right, is_causal, (long long)keys, (long long)plan.parts);
}

/* In a window no wider than a segment rows are one chain. */
static void test_windows(const dhp_varlen *args, int64_t segment) {
  check_window(*args, segment - 1, 0, 0, 3 * segment, 0);
  check_window(*args, segment - 1, -1, 1, 3 * segment, 0);
  check_window(*args, 10, segment - 11, 0, 3 * segment, 0);
  check_window(*args, segment, 0, 0, 3 * segment, 1);
  check_window(*args, 10, segment - 10, 0, 3 * segment, 1);
  check_window(*args, 10, -1, 0, 3 * segment, 1);
  check_window(*args, -1, 10, 0, 3 * segment, 1);
  check_window(*args, INT64_MAX, INT64_MAX, 0, segment + 1, 1);
  check_window(*args, INT64_MAX, 0, 0, segment, 0);
}

/* Of packed sequences beside the list of their tiles. */
static void test_packed(const dhp_kernel_info *kernel) {
  static const int32_t lengths[2]; /* no plan looks at them */
  const int64_t segment = (int64_t)kernel->tile_k * kernel->segment_tiles;
  dhp_varlen args = {.packed = call_of(kernel, 300, 3 * segment),
                     .sequences = 1,
                     .cu_seqlens_q = lengths,
                     .cu_seqlens_k = lengths,
                     .max_seqlen_q = 300};
  for (int beyond = 0; beyond < 2; beyond++) {
    args.max_seqlen_k = segment + beyond;
    dhp_packed_plan plan;
    dhp_error error = {""};
    const dhp_status status = dhp_plan_packed(&args, &plan, &error);
    if (!check(status == DHP_OK && plan.kernel, "%s", error.text)) continue;
    check(plan.parts == (beyond ? plan.grid * plan.kernel->tile_q : 0) &&
              dhp_varlen_workspace(&args, 1) ==
                  (size_t)plan.entries * BYTES_OF_TILE + bytes_of(plan.parts, plan.kernel),
          "%s, %d keys: %lld parts, %zu bytes", plan.kernel->name, (int)args.max_seqlen_k, (long long)plan.parts,
          dhp_varlen_workspace(&args, 1));
    check(dhp_varlen_workspace(&args, 0) == 0, "on the CPU: %zu bytes", dhp_varlen_workspace(&args, 0));
  }
  test_windows(&args, segment);
}

int main(void) {
  int kernels = 0;
  for (int i = 0; i < dhp_kernel_count(); i++) {
    const dhp_kernel_info *const kernel = dhp_kernel(i);
    if (strcmp(kernel->family, "forward") != 0 || strcmp(kernel->part, "out") != 0) continue;
    check_group(kernel->name);
    test_attention(kernel);
    test_packed(kernel);
    kernels++;
  }
  check(kernels > 0, "no kernel of the forward");
  return check_summary();
}
