/*
 * test_varlen_gradients.c - gradients of packed sequences: the bits of a call for each, on every kernel; 0 where no
 * sequence is; and what the entry point refuses.
 */
#include <string.h>

#include "../../../../csrc/cpu/backward/backward_cpu.h"
#include "../check.h"
#include "../test_cpu.h"
#include "gradients.h"

enum { SEQUENCES = 5, HEADS = 4, KEY_HEADS = 2, HEAD_DIM = 40, TOKENS = 143, KEY_TOKENS = 580 };

/* Shorter and longer than a tile of queries or keys; no query, no key. More than a tile of keys behind the last. */
static const int32_t cu_q[SEQUENCES + 1] = {0, 1, 131, 131, 136, 140};
static const int32_t cu_k[SEQUENCES + 1] = {0, 200, 330, 340, 340, 437};
static const int32_t used[SEQUENCES] = {101, 130, 2, 0, 97};

static size_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2; }

static char *row_at(const dhp_tensor *t, int64_t h, int64_t s) {
  return (char *)t->data + (h * t->stride[1] + s * t->stride[2]) * (int64_t)element_size(t->dtype);
}

static dhp_tensor rows_from(const dhp_tensor *t, int64_t first, int64_t count) {
  dhp_tensor part = *t;
  part.data = row_at(t, 0, first);
  part.size[2] = count;
  return part;
}

static int64_t keys_of(const dhp_varlen *args, int b) { return args->seqused_k ? used[b] : cu_k[b + 1] - cu_k[b]; }

/* Rows of t from `first` on that differ from those of `part`; without a part, from zeros. */
static int differences(const dhp_tensor *t, int64_t first, int64_t count, const dhp_tensor *part) {
  static const unsigned char zeros[HEAD_DIM * sizeof(double)];
  int found = 0;
  for (int64_t h = 0; h < t->size[1]; h++)
    for (int64_t i = 0; i < count; i++) {
      const void *const want = part ? row_at(part, h, i) : (const void *)zeros;
      found += memcmp(row_at(t, h, first + i), want, HEAD_DIM * element_size(t->dtype)) != 0;
    }
  return found;
}

/* What sequence b has as a call of its own. The caller frees it. */
static gradient_problem sequence_alone(const dhp_varlen_backward *args, int b) {
  const dhp_attention *const packed = &args->forward.packed;
  const dhp_dtype dtype = packed->q.dtype;
  const int64_t first = cu_q[b], queries = cu_q[b + 1] - first, keys = keys_of(&args->forward, b);
  gradient_problem p =
      gradients_new((shape){1, HEADS, KEY_HEADS, queries, keys, HEAD_DIM, packed->is_causal, 0}, dtype, CONTIGUOUS);
  dhp_attention *const forward = &p.args.forward;
  forward->q = rows_from(&packed->q, first, queries);
  forward->out = rows_from(&packed->out, first, queries);
  forward->k = rows_from(&packed->k, cu_k[b], keys);
  forward->v = rows_from(&packed->v, cu_k[b], keys);
  forward->causal_offset = args->forward.is_bottom_right ? keys - queries : 0;
  forward->is_windowed = packed->is_windowed;
  forward->window_left = packed->window_left;
  forward->window_right = packed->window_right;
  p.forward.mask = dhp_mask_of(forward);
  p.args.grad_out = rows_from(&args->grad_out, first, queries);
  const size_t number = dtype == DHP_FLOAT64 ? sizeof(double) : sizeof(float), size = (size_t)queries * number;
  for (int h = 0; h < HEADS; h++) {
    const size_t from = (size_t)(h * TOKENS + first) * number;
    memcpy((char *)p.forward.lse + (size_t)h * size, (const char *)packed->lse + from, size);
    memcpy((char *)p.grad_lse + (size_t)h * size, (const char *)args->grad_lse + from, size);
  }
  return p;
}

static void check_sequences(const dhp_cpu_kernel *kernel, dhp_varlen_backward *args, const char *what) {
  const dhp_tensor *const dq = &args->dq, *const of_keys[] = {&args->dk, &args->dv};
  int idle = differences(dq, cu_q[SEQUENCES], TOKENS - cu_q[SEQUENCES], NULL);
  for (int b = 0; b < SEQUENCES; b++) {
    gradient_problem p = sequence_alone(args, b);
    check(gradients_run(kernel, &p, NULL) == DHP_OK, "it runs alone");
    const int64_t keys = keys_of(&args->forward, b), next = b + 1 < SEQUENCES ? cu_k[b + 1] : KEY_TOKENS;
    int found = differences(dq, cu_q[b], cu_q[b + 1] - cu_q[b], &p.args.dq);
    for (int i = 0; i < 2; i++) {
      found += differences(of_keys[i], cu_k[b], keys, gradient(&p, i + 1));
      idle += differences(of_keys[i], cu_k[b] + keys, next - cu_k[b] - keys, NULL);
    }
    check(found == 0, "%s, dtype %d, %s, sequence %d: %d rows differ", kernel->instructions, (int)dq->dtype, what, b,
          found);
    gradients_free(&p);
  }
  check(idle == 0, "%s, dtype %d, %s: %d rows of no sequence are not 0", kernel->instructions, (int)dq->dtype, what,
        idle);
}

static dhp_varlen_backward packed_call(const gradient_problem *p) {
  return (dhp_varlen_backward){.forward = {.packed = p->args.forward,
                                           .sequences = SEQUENCES,
                                           .cu_seqlens_q = cu_q,
                                           .cu_seqlens_k = cu_k,
                                           .max_seqlen_q = 130,
                                           .max_seqlen_k = 200},
                               .grad_out = p->args.grad_out,
                               .grad_lse = p->args.grad_lse,
                               .dq = p->args.dq,
                               .dk = p->args.dk,
                               .dv = p->args.dv};
}

static void check_bits(dhp_dtype dtype, memory_layout layout, int variant) {
  static const char *const variants[] = {"all keys", "causal, used keys", "a window from the first key, used keys"};
  gradient_problem p =
      gradients_new((shape){1, HEADS, KEY_HEADS, TOKENS, KEY_TOKENS, HEAD_DIM, variant > 0, 0}, dtype, layout);
  dhp_varlen_backward args = packed_call(&p);
  args.forward.packed.is_windowed = variant == 2;
  args.forward.packed.window_left = 99;
  args.forward.packed.window_right = 5;
  args.forward.seqused_k = variant ? used : NULL;
  args.forward.is_bottom_right = variant != 2;
  for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++) {
    gradients_poison(&p);
    const dhp_status status = dtype == DHP_FLOAT64 ? dhp_cpu_varlen_backward(&args, NULL, NULL)
                                                   : dhp_cpu_varlen_backward_with(&test_kernels[k], &args, NULL, NULL);
    check(status == DHP_OK, "it runs");
    check_sequences(&test_kernels[k], &args, variants[variant]);
    for (int i = 0; i < 3; i++)
      check(gaps_touched(gradient(&p, i), p.gradients[i]) == 0, "%s: written between rows", gradient_names[i]);
  }
  gradients_free(&p);
}

/* self: how often it was asked to run. */
static void count_passes(void *self, int64_t count, void (*body)(void *context, int64_t first, int64_t last),
                         void *context) {
  ++*(int *)self;
  body(context, 0, count);
}

static void test_passes(void) {
  check_group("gradients of packed sequences: as many passes as one sequence");
  gradient_problem p =
      gradients_new((shape){1, HEADS, KEY_HEADS, TOKENS, KEY_TOKENS, 8, 0, 0}, DHP_FLOAT16, CONTIGUOUS);
  const dhp_varlen_backward args = packed_call(&p);
  int packed = 0, alone = 0;
  const dhp_executor of_packed = {count_passes, &packed}, of_one = {count_passes, &alone};
  check(dhp_varlen_backward_cpu(&args, &of_packed, NULL) == DHP_OK &&
            gradients_run(test_kernels, &p, &of_one) == DHP_OK,
        "they run");
  check(packed == alone && alone > 0, "%d passes of packed sequences, %d of one", packed, alone);
  gradients_free(&p);
}

static void check_refused(const dhp_varlen_backward *args, dhp_status want, const char *words) {
  dhp_error error = {""};
  const dhp_status status = dhp_varlen_backward_cpu(args, NULL, &error);
  check(status == want && strncmp(error.text, words, strlen(words)) == 0, "status %d, \"%s\"; expected \"%s\"",
        (int)status, error.text, words);
}

static void test_refused(void) {
  check_group("gradients of packed sequences: refusals");
  gradient_problem p =
      gradients_new((shape){1, HEADS, KEY_HEADS, TOKENS, KEY_TOKENS, 8, 0, 0}, DHP_FLOAT16, CONTIGUOUS);
  const dhp_varlen_backward good = packed_call(&p);
  dhp_error error = {""};
  check(dhp_varlen_backward_check(&good, 0, &error) == DHP_OK, "a good call: %s", error.text);
  const char *const on_cuda = "cu_seqlens_q: gradients of packed sequences; supported on CUDA";
  check(dhp_varlen_backward_check(&good, 1, &error) == DHP_UNSUPPORTED &&
            strncmp(error.text, on_cuda, strlen(on_cuda)) == 0,
        "on CUDA: %s", error.text);
  dhp_varlen_backward bad = good;
  bad.forward.page_table = used;
  check_refused(&bad, DHP_UNSUPPORTED, "page_table: given, but a cache in pages has no gradients");
  bad = good;
  bad.forward.packed.lse = NULL;
  check_refused(&bad, DHP_INVALID_ARGUMENT, "lse: missing");
  bad = good;
  bad.grad_out.size[2]--;
  check_refused(&bad, DHP_INVALID_ARGUMENT, "grad_out: shape [142, 4, 8] differs from out's [143, 4, 8]");
  bad = good;
  bad.dk.size[1]++;
  check_refused(&bad, DHP_INVALID_ARGUMENT, "dk: shape [580, 3, 8] differs from k's [580, 2, 8]");
  bad = good;
  bad.forward.max_seqlen_k = 199;
  check_refused(&bad, DHP_INVALID_ARGUMENT, "max_seqlen_k: 199");
  size_t written = 0;
  for (int i = 0; i < 3; i++)
    for (size_t byte = 0; byte < p.gradients[i].size; byte++)
      written += p.gradients[i].data[byte] != 0xa5;
  check(written == 0, "%zu bytes were written before a refusal", written);
  gradients_free(&p);
}

void test_varlen_gradients(void) {
  check_group("gradients of packed sequences: the bits of a call for each");
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int variant = 0; variant < 3; variant++)
      check_bits((dhp_dtype)dtype, (memory_layout)variant, variant);
  test_passes();
  test_refused();
}
