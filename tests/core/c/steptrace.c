/*
 * steptrace.c - runs a kernel one instruction at a time and compares what it does on different data.
 *
 * A child process runs the kernel under ptrace; the parent single-steps it and hashes, at every instruction, the
 * program counter (the path), and all general-purpose registers. Every address is computed from those registers (the
 * kernel has no gathers), so equal hashes mean the same branches, the same instructions and the same addresses. This
 * reaches what Valgrind cannot emulate: AVX-512.
 *
 * Where rows end inside a vector, memcpy moves their last elements through general-purpose registers; such shapes
 * compare the path alone.
 *
 * Link with -z now: the loader's lazy binding is noise. Compile with -fno-omit-frame-pointer: so is whatever the parent
 * has in rbp otherwise.
 *
 *     ./steptrace                   exit 0: all data alike
 *     ./steptrace planted-branch    must find another path, and exits 1; planted-index: other registers
 *     exit 77: not an x86-64 CPU, or ptrace is not permitted
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "secrecy.h"

enum {
  NOT_PERMITTED = 77,
  MOST_LANES = 16, /* floats of the widest vector */
  LEAST_VECTOR = 4 /* floats of the narrowest: the library's memcpy moves fewer by general-purpose registers */
};

/* ---- tracing --------------------------------------------------------------------------------------------------- */

typedef struct trace {
  long steps;
  uint64_t path, registers; /* hashes */
} trace;

/* FNV-1a (Fowler, Noll, Vo), eight bytes at a time. */
static void hash(uint64_t *state, uint64_t value) { *state = (*state ^ value) * 0x100000001b3u; }

/* From the child's present stop to its end. */
static trace step_through(pid_t child) {
  trace t = {0, 0xcbf29ce484222325u, 0xcbf29ce484222325u}; /* FNV's offset basis */
  for (;;) {
    int status;
    if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0 || waitpid(child, &status, 0) != child) exit(NOT_PERMITTED);
    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS) return t;
    if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) {
      fprintf(stderr, "the traced process failed: status %x\n", (unsigned)status);
      exit(EXIT_FAILURE);
    }
    struct user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, child, NULL, &registers) != 0) exit(NOT_PERMITTED);
    uint64_t words[sizeof registers / sizeof(uint64_t)];
    memcpy(words, &registers, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
      hash(&t.registers, words[i]);
    hash(&t.path, registers.rip);
    t.steps++;
  }
}

/* Runs work(context) in a child; every child starts from the same memory, so that addresses are comparable. */
static trace trace_of(void (*work)(const void *context), const void *context) {
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(NOT_PERMITTED);
    /* Stops for the parent, with nothing of the parent's own (its loop counters) left in registers. */
    __asm__ volatile(
        "xor %%ebx, %%ebx; xor %%r12d, %%r12d; xor %%r13d, %%r13d; xor %%r14d, %%r14d; xor %%r15d, %%r15d; int3"
        :
        :
        : "rbx", "r12", "r13", "r14", "r15", "cc");
    work(context);
    _exit(EXIT_SUCCESS);
  }
  int status;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) exit(NOT_PERMITTED);
  return step_through(child);
}

/* ---- the kernel on different data ------------------------------------------------------------------------------ */

typedef struct task {
  const dhp_cpu_kernel *kernel;
  const dhp_cpu_rows *rows;
} task;

/* The tile kernel alone: around it, the library's memset wipes scratch memory in a great many steps. */
static void attend(const void *context) {
  static dhp_cpu_scratch scratch;
  const task *const t = context;
  secrecy_attend(t->kernel, t->rows, &scratch);
}

/* Data that takes every special path an implementation might have. */
static const char *const classes[] = {"normal", "zeros", "huge", "subnormal", "NaN and infinity", "ascending scores"};
enum { CLASSES = sizeof classes / sizeof *classes };

static double element_of(int class, int64_t row) {
  switch (class) {
  case 1: return 0.0;
  case 2: return random_normal() * 1e4;
  case 3: return random_normal() * 1e-40;
  case 4: return random_below(3) ? random_normal() : random_below(2) ? (double)NAN : HUGE_VAL;
  case 5: return (double)row;
  default: return random_normal();
  }
}

static void fill(const dhp_tensor *t, int class) {
  for (int64_t h = 0; h < t->size[1]; h++)
    for (int64_t s = 0; s < t->size[2]; s++)
      for (int64_t d = 0; d < t->size[3]; d++)
        set(t, 0, h, s, d, element_of(class, s));
}

/* One case in one direction; the first class's trace is the one that the others have to repeat. */
typedef struct series {
  const char *instructions, *what, *direction;
  dhp_dtype dtype;
  int compares_registers, differences;
  trace first;
} series;

static void add_trace(series *s, int class, trace now) {
  if (class == 0) s->first = now;
  if (now.path != s->first.path || now.steps != s->first.steps ||
      (s->compares_registers && now.registers != s->first.registers)) {
    printf("%s, dtype %d, %s, %s, %s: %ld steps, %s; \"%s\": %ld steps\n", s->instructions, (int)s->dtype, s->what,
           s->direction, classes[class], now.steps, now.path == s->first.path ? "other registers" : "another path",
           classes[0], s->first.steps);
    s->differences++;
  }
}

static int end_series(const series *s) {
  printf("%-8s dtype %d %8ld steps %s: %s\n", s->instructions, (int)s->dtype, s->first.steps, s->direction, s->what);
  return s->differences;
}

/* Same path on all classes, and the same registers if the rows are whole vectors; returns the number of differences. */
static int compare_classes(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype) {
  problem p = secrecy_problem(c, dtype, CONTIGUOUS);
  int32_t pages[MOST_PAGES];
  const problem placed = secrecy_in_pages(c, &p, pages);
  const dhp_cpu_rows rows = secrecy_rows(&placed);
  const task t = {kernel, &rows};
  series s = {kernel->instructions, c->what, "forward", dtype, c->s.head_dim % MOST_LANES == 0, 0, {0}};
  for (int class = 0; class < CLASSES; class++) {
    fill(&p.args.q, class);
    fill(&p.args.k, class);
    fill(&p.args.v, class);
    for (int64_t h = 0; h < c->s.heads; h++)
      set_sink(dtype, h, element_of(class, h));
    add_trace(&s, class, trace_of(attend, &t));
  }
  problem_free(&p);
  return end_series(&s);
}

typedef struct gradient_task {
  const dhp_cpu_kernel *kernel;
  const gradient_problem *problem;
} gradient_task;

static void differentiate(const void *context) {
  static dhp_cpu_scratch scratch;
  static float lse[MOST_QUERIES], delta[MOST_QUERIES];
  const gradient_task *const t = context;
  secrecy_differentiate(t->kernel, t->problem, lse, delta, &scratch);
}

/* The same of a backward; lse, too, is moved through general-purpose registers if there are few queries. */
static int compare_gradient_classes(const dhp_cpu_kernel *kernel, const secrecy_case *c, dhp_dtype dtype) {
  gradient_problem p = secrecy_gradients(c, dtype, CONTIGUOUS);
  const gradient_task t = {kernel, &p};
  const int whole_vectors = c->s.head_dim % MOST_LANES == 0 && c->s.queries >= LEAST_VECTOR;
  series s = {kernel->instructions, c->what, "backward", dtype, whole_vectors, 0, {0}};
  for (int class = 0; class < CLASSES; class++) {
    const dhp_tensor *const tensors[] = {&p.args.forward.q, &p.args.forward.k, &p.args.forward.v, &p.args.forward.out,
                                         &p.args.grad_out};
    for (int i = 0; i < 5; i++)
      fill(tensors[i], class);
    for (int64_t h = 0; h < c->s.heads; h++)
      set_sink(dtype, h, element_of(class, h));
    for (int64_t row = 0; row < c->s.batch * c->s.heads * c->s.queries; row++) {
      p.forward.lse[row] = (float)element_of(class, row);
      ((float *)p.grad_lse)[row] = (float)element_of(class, row);
    }
    add_trace(&s, class, trace_of(differentiate, &t));
  }
  gradients_free(&p);
  return end_series(&s);
}

/* ---- leaks that must be found ---------------------------------------------------------------------------------- */

static volatile float sink;

static void planted_branch(const void *secret) {
  if (*(const float *)secret > 0.f) sink = 1.f;
}

static void planted_index(const void *secret) {
  static const float table[16] = {0};
  uint32_t bits;
  memcpy(&bits, secret, sizeof bits);
  sink = table[bits >> 28];
}

static int find_planted(void (*leak)(const void *secret)) {
  float secret = 1.f;
  const trace positive = trace_of(leak, &secret);
  secret = -1.f;
  const trace negative = trace_of(leak, &secret);
  printf("path %s, registers %s\n", positive.path == negative.path ? "equal" : "differs",
         positive.registers == negative.registers ? "equal" : "differ");
  return positive.registers != negative.registers;
}

int main(int argc, char **argv) {
  random_seed(1);
  if (argc > 1 && strcmp(argv[1], "planted-branch") == 0) return find_planted(planted_branch);
  if (argc > 1 && strcmp(argv[1], "planted-index") == 0) return find_planted(planted_index);

  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels); /* the first is the one that dhp_cpu_forward uses here */
  int differences = 0;
  for (int i = 0; i < SECRECY_CASES; i++)
    for (int dtype = 0; dtype < secrecy_cases[i].traced; dtype++)
      differences += compare_classes(&kernels[0], &secrecy_cases[i], (dhp_dtype)dtype) +
                     compare_gradient_classes(&kernels[0], &secrecy_cases[i], (dhp_dtype)dtype);
  return differences != 0;
}
