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

#include "../../../csrc/cpu/tile.h"
#include "check.h"
#include "reference.h"

static void make_secret(storage s) { VALGRIND_MAKE_MEM_UNDEFINED(s.data, s.size); }

/* An output is public once it is handed over. */
static void declassify(void *data, size_t size) { VALGRIND_MAKE_MEM_DEFINED(data, size); }

static int run(const dhp_cpu_kernel *kernel, shape s, dhp_dtype dtype, memory_layout layout) {
  problem p = problem_new(s, dtype, layout);
  make_secret(p.q);
  make_secret(p.k);
  make_secret(p.v);
  const dhp_status status = dhp_cpu_forward_with(kernel, &p.args, NULL, NULL);
  unsigned char undefined_bits =
      0; /* of the last byte of the last row: were it public, nothing would have been tested */
  VALGRIND_GET_VBITS(p.out.data + p.out.size - 1, &undefined_bits, 1);
  declassify(p.out.data, p.out.size);
  declassify(p.lse, (size_t)(s.batch * s.heads * s.queries) * sizeof(float));
  problem_free(&p);
  return status == DHP_OK && (undefined_bits != 0) == (s.keys > 0);
}

static int run_all(void) {
  static const shape shapes[] = {
      {1, 1, 1, 1, 130, 64, 0, 0},   /* decoding */
      {2, 4, 2, 37, 101, 20, 1, 64}, /* grouped heads, causal */
      {1, 1, 1, 131, 99, 67, 1, -5}, /* two query tiles, two key tiles, rows that see nothing */
      {1, 2, 1, 9, 200, 129, 0, 0},  /* three key tiles, odd head_dim */
      {1, 1, 1, 5, 0, 8, 0, 0},      /* no keys */
  };
  dhp_cpu_kernel kernels[3];
  const int count = dhp_cpu_kernels(kernels);
  int runs = 0;
  for (int k = 0; k < count; k++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++)
      for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (!run(&kernels[k], shapes[i], (dhp_dtype)dtype, (memory_layout)(i % 3))) {
          fprintf(stderr, "%s, dtype %d, shape %zu: failed, or the output was not secret\n", kernels[k].instructions,
                  dtype, i);
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
