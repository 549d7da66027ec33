/*
 * ctgrind.c - the CPU kernel on data that Valgrind's memcheck holds undefined (Langley's ctgrind): a branch or an
 * address that depends on q, k, v or what gradients are computed from is then an error. Run it as
 *
 *     valgrind --error-exitcode=99 ./ctgrind                   must report nothing
 *     valgrind --error-exitcode=99 ./ctgrind planted-branch    must report planted_branch
 *     valgrind --error-exitcode=99 ./ctgrind planted-index     must report planted_index
 *
 * Valgrind has no AVX-512: what it runs is the AVX2 and the baseline kernel, of the same source. See steptrace.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <valgrind/memcheck.h>

#include "../../../csrc/cpu/backward/backward_cpu.h"
#include "../../../csrc/cpu/float64/float64.h"
#include "check.h"
#include "secrecy.h"

static void make_secret(storage s) { VALGRIND_MAKE_MEM_UNDEFINED(s.data, s.size); }

static int64_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2; }

/* An output is public once it is handed over. */
static void declassify(void *data, size_t size) { VALGRIND_MAKE_MEM_DEFINED(data, size); }

/* Rows of the first head of an output whose first byte is undefined. Were outputs public, nothing would have been
 * tested.
 */
static int64_t secret_rows(const dhp_tensor *t) {
  int64_t secret = 0;
  for (int64_t row = 0; row < t->size[2]; row++) {
    unsigned char bits = 0;
    VALGRIND_GET_VBITS((const char *)t->data + row * t->stride[2] * element_size(t->dtype), &bits, 1);
    secret += bits != 0;
  }
  return secret;
}

static int64_t rows_that_see(const dhp_mask *mask) {
  int64_t seeing = 0;
  for (int64_t row = 0; row < mask->queries; row++) {
    const dhp_key_range seen = dhp_mask_row(mask, row);
    seeing += seen.first < seen.last;
  }
  return seeing;
}

static int run(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype, memory_layout layout) {
  problem p = secrecy_problem(c, dtype, layout);
  make_secret(p.q);
  make_secret(p.k);
  make_secret(p.v);
  VALGRIND_MAKE_MEM_UNDEFINED(secrecy_sinks, sizeof secrecy_sinks);
  dhp_status status = DHP_OK;
  if (dtype == DHP_FLOAT64)
    dhp_float64_forward(&p.args, &p.mask, &p.places, NULL);
  else
    status = dhp_cpu_forward_with(kernel, &p.args, &p.mask, NULL, NULL);
  const int64_t undefined = secret_rows(&p.args.out), seen = rows_that_see(&p.mask);
  declassify(p.out.data, p.out.size);
  declassify(p.lse, p.lse_size);
  declassify(secrecy_sinks, sizeof secrecy_sinks);
  problem_free(&p);
  return status == DHP_OK && undefined == seen;
}

/* The same rows as two packed sequences, of which the second has the last query; or with both in the same pages. */
static int run_packed(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype) {
  problem p = secrecy_problem(c, dtype, CONTIGUOUS);
  const int32_t queries = (int32_t)c->s.queries, keys = (int32_t)c->s.keys;
  const int32_t cu_q[] = {0, queries - 1, queries}, cu_k[] = {0, keys / 2, keys}, used[] = {keys / 2, keys};
  int32_t pages[2 * MOST_PAGES];
  const problem placed = secrecy_in_pages(c, &p, pages);
  memcpy(pages + MOST_PAGES, pages, sizeof pages / 2);
  dhp_varlen args = {.packed = placed.args,
                     .sequences = 2,
                     .cu_seqlens_q = cu_q,
                     .cu_seqlens_k = cu_k,
                     .seqused_k = c->page_size ? used : NULL,
                     .page_table = placed.places.pages,
                     .page_table_width = MOST_PAGES,
                     .max_seqlen_q = queries,
                     .max_seqlen_k = keys,
                     .is_bottom_right = 1};
  args.packed.q.size[0] = args.packed.out.size[0] = 1; /* packed tensors have one batch */
  make_secret(p.q);
  make_secret(p.k);
  make_secret(p.v);
  VALGRIND_MAKE_MEM_UNDEFINED(secrecy_sinks, sizeof secrecy_sinks);
  const dhp_status status = dhp_cpu_varlen_with(kernel, &args, NULL, NULL);
  const int64_t undefined = secret_rows(&p.args.out);
  declassify(p.out.data, p.out.size);
  declassify(p.lse, p.lse_size);
  declassify(secrecy_sinks, sizeof secrecy_sinks);
  problem_free(&p);
  return status == DHP_OK && undefined == (keys / 2 > 0 ? queries - 1 : 0) + (keys > 0);
}

static void make_gradients_secret(const gradient_problem *p) {
  make_secret(p->forward.q);
  make_secret(p->forward.k);
  make_secret(p->forward.v);
  make_secret(p->forward.out);
  make_secret(p->grad_out);
  VALGRIND_MAKE_MEM_UNDEFINED(p->forward.lse, p->forward.lse_size);
  VALGRIND_MAKE_MEM_UNDEFINED(p->grad_lse, p->forward.lse_size);
}

static void declassify_gradients(const gradient_problem *p) {
  for (int i = 0; i < 3; i++)
    declassify(p->gradients[i].data, p->gradients[i].size);
}

static int run_gradients(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype, memory_layout layout) {
  gradient_problem p = secrecy_gradients(c, dtype, layout);
  make_gradients_secret(&p);
  int right = gradients_run(kernel, &p, NULL) == DHP_OK;
  const dhp_mask by_key = dhp_mask_transposed(&p.forward.mask);
  for (int i = 0; i < 3; i++)
    if (gradient(&p, i)->data)
      right &= secret_rows(gradient(&p, i)) == rows_that_see(i == 0 ? &p.forward.mask : &by_key);
  declassify_gradients(&p);
  gradients_free(&p);
  return right;
}

static int run_sinks(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype, memory_layout layout) {
  gradient_problem p = secrecy_gradients(c, dtype, layout);
  const dhp_sinks_backward args = gradients_of_sinks(&p, secrecy_sinks, secrecy_dsinks);
  make_gradients_secret(&p);
  VALGRIND_MAKE_MEM_UNDEFINED(secrecy_sinks, sizeof secrecy_sinks);
  int right = dhp_cpu_sinks_backward_with(kernel, &args, NULL, NULL) == DHP_OK;
  const dhp_tensor dsinks = {.data = secrecy_dsinks,
                             .size = {1, 1, c->s.heads, 1},
                             .stride = {0, 0, 1, 1},
                             .dtype = dtype == DHP_FLOAT64 ? DHP_FLOAT64 : DHP_FLOAT32};
  right &= secret_rows(&dsinks) == c->s.heads;
  declassify(secrecy_sinks, sizeof secrecy_sinks);
  declassify(secrecy_dsinks, sizeof secrecy_dsinks);
  gradients_free(&p);
  return right;
}

/* The same rows as two packed sequences, of which the second has the last query and not all of its keys. */
static int run_packed_gradients(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype) {
  gradient_problem p = secrecy_gradients(c, dtype, CONTIGUOUS);
  const int32_t queries = (int32_t)c->s.queries, keys = (int32_t)c->s.keys;
  const int32_t cu_q[] = {0, queries - 1, queries}, cu_k[] = {0, keys / 2, keys}, used[] = {keys / 2, (keys + 1) / 4};
  dhp_varlen_backward args = {.forward = {.packed = p.args.forward,
                                          .sequences = 2,
                                          .cu_seqlens_q = cu_q,
                                          .cu_seqlens_k = cu_k,
                                          .seqused_k = used,
                                          .max_seqlen_q = queries,
                                          .max_seqlen_k = keys,
                                          .is_bottom_right = 1},
                              .grad_out = p.args.grad_out,
                              .grad_lse = p.args.grad_lse,
                              .dq = p.args.dq,
                              .dk = p.args.dk,
                              .dv = p.args.dv};
  dhp_attention *const packed = &args.forward.packed;
  dhp_tensor *const tensors[] = {&packed->q,     &packed->k, &packed->v, &packed->out,
                                 &args.grad_out, &args.dq,   &args.dk,   &args.dv};
  for (int i = 0; i < 8; i++)
    tensors[i]->size[0] = 1; /* packed tensors have one batch */
  make_gradients_secret(&p);
  const dhp_status status = dtype == DHP_FLOAT64 ? dhp_cpu_varlen_backward(&args, NULL, NULL)
                                                 : dhp_cpu_varlen_backward_with(kernel, &args, NULL, NULL);
  const int64_t seeing = (used[0] > 0 ? queries - 1 : 0) + (used[1] > 0);
  const int64_t seen = (queries > 1 ? used[0] : 0) + used[1];
  int right = status == DHP_OK;
  for (int i = 0; i < 3; i++)
    if (gradient(&p, i)->data) right &= secret_rows(gradient(&p, i)) == (i == 0 ? seeing : seen);
  declassify_gradients(&p);
  gradients_free(&p);
  return right;
}

static int run_all(void) {
  dhp_cpu_kernel kernels[3];
  const int count = dhp_cpu_kernels(kernels);
  int runs = 0;
  for (int k = 0; k < count; k++)
    for (int dtype = DHP_FLOAT32; dtype <= (k == 0 ? DHP_FLOAT64 : DHP_BFLOAT16); dtype++) /* float64 has no kernels */
      for (int i = 0; i < SECRECY_CASES; i++) {
        const memory_layout layout = (memory_layout)(i % 3);
        if (!run(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype, layout) ||
            !run_gradients(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype, layout) ||
            !run_sinks(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype, layout) ||
            !run_packed_gradients(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype) ||
            (dtype != DHP_FLOAT64 && !run_packed(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype))) {
          fprintf(stderr, "%s, dtype %d, %s: failed, or the output was not secret\n", kernels[k].instructions, dtype,
                  secrecy_cases[i].what);
          return EXIT_FAILURE;
        }
        runs += dtype == DHP_FLOAT64 ? 4 : 5;
      }
  printf("%d runs on secret data, kernels:", runs);
  for (int k = 0; k < count; k++)
    printf(" %s", kernels[k].instructions);
  printf("\n");
  return EXIT_SUCCESS;
}

/* ---- leaks that must be found ---------------------------------------------------------------------------------- */

static volatile float sink;

__attribute__((noinline)) static void planted_branch(const float *secret) {
  if (secret[3] > 0.f) sink = 1.f;
}

__attribute__((noinline)) static void planted_index(const float *secret, const float *table) {
  uint32_t bits;
  memcpy(&bits, &secret[3], sizeof bits);
  sink = table[bits & 15u];
}

int main(int argc, char **argv) {
  if (!RUNNING_ON_VALGRIND) {
    fprintf(stderr, "ctgrind proves nothing unless it runs under valgrind\n");
    return EXIT_FAILURE;
  }
  random_seed(1);
  if (argc == 1) return run_all();

  problem p = problem_new((shape){1, 1, 1, 2, 8, 8, 0, 0}, DHP_FLOAT32, CONTIGUOUS);
  make_secret(p.q);
  if (strcmp(argv[1], "planted-branch") == 0) planted_branch(p.args.q.data);
  if (strcmp(argv[1], "planted-index") == 0) planted_index(p.args.q.data, p.args.k.data);
  problem_free(&p);
  return EXIT_SUCCESS;
}
