/* test_varlen.c - packed sequences: the bits of a call for each, on every kernel; and what the entry point refuses. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "reference.h"
#include "test_cpu.h"

enum { SEQUENCES = 5, HEADS = 4, KEY_HEADS = 2, REST = 3 };

/* Shorter and longer than a tile of queries or keys; no query, no key. */
static const int32_t cu_q[SEQUENCES + 1] = {0, 1, 131, 131, 136, 140};
static const int32_t cu_k[SEQUENCES + 1] = {0, 200, 330, 340, 340, 437};
static const int32_t used[SEQUENCES] = {101, 130, 2, 0, 97};

static dhp_tensor rows_from(const dhp_tensor *t, int64_t first, int64_t count) {
  dhp_tensor part = *t;
  part.data = (char *)t->data + first * t->stride[2] * (t->dtype == DHP_FLOAT32 ? 4 : 2);
  part.size[2] = count;
  return part;
}

/* Elements of out and lse that differ from those of a call for sequence b. */
static int differences(const dhp_cpu_kernel *kernel, const dhp_varlen *args, int b) {
  const dhp_attention *const packed = &args->packed;
  const int64_t first = cu_q[b], queries = cu_q[b + 1] - first, tokens = packed->q.size[2];
  const int64_t keys = args->seqused_k ? used[b] : cu_k[b + 1] - cu_k[b];
  problem p = problem_new((shape){1, HEADS, KEY_HEADS, queries, keys, packed->q.size[3], packed->is_causal, 0},
                          packed->q.dtype, CONTIGUOUS);
  const dhp_tensor out = p.args.out, part = rows_from(&packed->out, first, queries);
  p.args.q = rows_from(&packed->q, first, queries);
  p.args.k = rows_from(&packed->k, cu_k[b], keys);
  p.args.v = rows_from(&packed->v, cu_k[b], keys);
  p.args.causal_offset = args->is_bottom_right ? keys - queries : 0;
  p.args.is_windowed = packed->is_windowed;
  p.args.window_left = packed->window_left;
  p.args.window_right = packed->window_right;
  p.mask = dhp_mask_of(&p.args);
  int found = 0;
  if (queries > 0) run_kernel(kernel, &p);
  for (int64_t row = 0; row < HEADS * queries; row++) {
    const int64_t h = row / queries, i = row % queries;
    for (int64_t d = 0; d < out.size[3]; d++)
      found += get_bits(&out, 0, h, i, d) != get_bits(&part, 0, h, i, d);
    found += memcmp(&p.lse[row], (const float *)packed->lse + h * tokens + first + i, sizeof(float)) != 0;
  }
  problem_free(&p);
  return found;
}

static void check_bits(dhp_dtype dtype, memory_layout layout, int variant) {
  problem p = problem_new((shape){1, HEADS, KEY_HEADS, 140 + REST, 437, 40, variant > 0, 0}, dtype, layout);
  p.args.is_windowed = variant == 2;
  p.args.window_left = 99;
  p.args.window_right = 5;
  const dhp_varlen args = {.packed = p.args,
                           .sequences = SEQUENCES,
                           .cu_seqlens_q = cu_q,
                           .cu_seqlens_k = cu_k,
                           .seqused_k = variant ? used : NULL,
                           .max_seqlen_q = 130,
                           .max_seqlen_k = 200,
                           .is_bottom_right = variant != 2};
  for (int k = 0; k < test_kernel_count; k++) {
    problem_poison(&p);
    check(dhp_cpu_varlen_with(&test_kernels[k], &args, NULL, NULL) == DHP_OK, "it runs");
    for (int b = 0; b < SEQUENCES; b++) {
      const int found = differences(&test_kernels[k], &args, b);
      check(found == 0, "%s, dtype %d, variant %d, sequence %d: %d numbers differ", test_kernels[k].instructions,
            (int)dtype, variant, b, found);
    }
    int rest = 0;
    for (int64_t row = 0; row < HEADS * REST; row++) {
      const int64_t h = row / REST, i = 140 + row % REST;
      rest += p.lse[h * (140 + REST) + i] != -HUGE_VALF;
      for (int64_t d = 0; d < 40; d++)
        rest += get_bits(&p.args.out, 0, h, i, d) != 0;
    }
    check(rest == 0 && problem_gaps_touched(&p) == 0, "%s: rows of no sequence, %d numbers differ",
          test_kernels[k].instructions, rest);
  }
  problem_free(&p);
}

static void test_refused(void) {
  check_group("packed sequences: refusals");
  problem p = problem_new((shape){1, HEADS, KEY_HEADS, 140, 437, 8, 0, 0}, DHP_FLOAT16, CONTIGUOUS);
  dhp_varlen args = {.packed = p.args,
                     .sequences = SEQUENCES,
                     .cu_seqlens_q = cu_q,
                     .cu_seqlens_k = cu_k,
                     .max_seqlen_q = 130,
                     .max_seqlen_k = 200};
  dhp_error error = {""};
  check(dhp_varlen_check(&args, 0, &error) == DHP_OK, "a good call: %s", error.text);
  check(dhp_varlen_check(&args, 1, &error) == DHP_NO_GPU && strncmp(error.text, "this build has no GPU", 21) == 0,
        "on CUDA: %s", error.text);
  args.max_seqlen_k = 199;
  check(dhp_varlen_cpu(&args, NULL, &error) == DHP_INVALID_ARGUMENT &&
            strncmp(error.text, "max_seqlen_k: 199", 17) == 0,
        "too long: %s", error.text);
  size_t touched = 0;
  for (size_t i = 0; i < p.out.size; i++)
    touched += p.out.data[i] != 0xa5;
  check(touched == 0, "%zu bytes were written before the refusal", touched);
  problem_free(&p);
}

void test_varlen(void) {
  check_group("packed sequences: the bits of a call for each");
  for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++)
    for (int variant = 0; variant < 3; variant++)
      check_bits((dhp_dtype)dtype, (memory_layout)(variant % 3), variant);
  test_refused();
}
