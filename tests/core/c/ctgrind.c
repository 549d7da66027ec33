/*
 * ctgrind.c - the CPU kernel on data that Valgrind's memcheck holds undefined (Langley's ctgrind): a branch or an
 * address that depends on q, k or v is then an error. Run it as
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

#include "check.h"
#include "secrecy.h"

static void make_secret(storage s) { VALGRIND_MAKE_MEM_UNDEFINED(s.data, s.size); }

static int64_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT32 ? 4 : 2; }

/* An output is public once it is handed over. */
static void declassify(void *data, size_t size) { VALGRIND_MAKE_MEM_DEFINED(data, size); }

static int run(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype, memory_layout layout) {
  problem p = secrecy_problem(c, dtype, layout);
  const shape s = c->s;
  make_secret(p.q);
  make_secret(p.k);
  make_secret(p.v);
  const dhp_status status = dhp_cpu_forward_with(kernel, &p.args, &p.mask, NULL, NULL);
  int undefined = 0, seen = 0; /* were outputs public, nothing would have been tested */
  for (int64_t row = 0; row < s.queries; row++) {
    const dhp_key_range keys = dhp_mask_row(&p.mask, row);
    unsigned char bits = 0;
    const char *const first = (const char *)p.args.out.data + row * p.args.out.stride[2] * element_size(dtype);
    VALGRIND_GET_VBITS(first, &bits, 1);
    undefined += bits != 0;
    seen += keys.first < keys.last;
  }
  declassify(p.out.data, p.out.size);
  declassify(p.lse, (size_t)(s.batch * s.heads * s.queries) * sizeof(float));
  problem_free(&p);
  return status == DHP_OK && undefined == seen;
}

static int run_all(void) {
  dhp_cpu_kernel kernels[3];
  const int count = dhp_cpu_kernels(kernels);
  int runs = 0;
  for (int k = 0; k < count; k++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++)
      for (int i = 0; i < SECRECY_CASES; i++) {
        if (!run(&kernels[k], &secrecy_cases[i], (dhp_dtype)dtype, (memory_layout)(i % 3))) {
          fprintf(stderr, "%s, dtype %d, %s: failed, or the output was not secret\n", kernels[k].instructions, dtype,
                  secrecy_cases[i].what);
          return EXIT_FAILURE;
        }
        runs++;
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
