/*
 * test_runtime.c - executors, scratch memory, floating-point state.
 *
 * Linked with -Wl,--wrap=aligned_alloc,--wrap=free: the kernel's scratch memory passes through the two functions below.
 */
#include <fenv.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "gradients/gradients.h"
#include "reference.h"
#include "test_cpu.h"

/* ---- scratch memory, observed ------------------------------------------------------------------------------------ */

void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *memory);
void __wrap_free(void *memory);

enum { MOST_SCRATCHES = 64 };
static const uint32_t UNTOUCHED = 0xffffffffu; /* NaN wherever something is read before it is written */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t *scratches[MOST_SCRATCHES];
static size_t sizes[MOST_SCRATCHES];
static int memory_left = INT_MAX /* allocations that will succeed */, allocated, freed, dirty;

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
  pthread_mutex_lock(&lock);
  void *memory = NULL;
  int slot = 0;
  while (slot < MOST_SCRATCHES && scratches[slot])
    slot++;
  if (memory_left-- > 0) {
    memory = __real_aligned_alloc(alignment, size);
    if (!memory || slot == MOST_SCRATCHES) abort();
    memset(memory, UNTOUCHED & 0xff, size);
    scratches[slot] = memory;
    sizes[slot] = size;
    allocated++;
  }
  pthread_mutex_unlock(&lock);
  return memory;
}

void __wrap_free(void *memory) {
  pthread_mutex_lock(&lock);
  for (int i = 0; memory && i < MOST_SCRATCHES; i++)
    if (scratches[i] == memory) {
      uint32_t left = 0;
      for (size_t word = 0; word < sizes[i] / sizeof left; word++)
        left |= (scratches[i][word] != 0) & (scratches[i][word] != UNTOUCHED);
      dirty += (int)left;
      freed++;
      scratches[i] = NULL;
    }
  pthread_mutex_unlock(&lock);
  __real_free(memory);
}

/* ---- executors ------------------------------------------------------------------------------------------------- */

typedef struct part {
  void (*body)(void *context, int64_t first, int64_t last);
  void *context;
  int64_t first, last;
} part;

static void *run_part(void *argument) {
  const part *const p = argument;
  p->body(p->context, p->first, p->last);
  return NULL;
}

/* self: the number of parts, each in a thread of its own; sizes differ as much as they can, and some are empty. */
static void run_threads(void *self, int64_t count, void (*body)(void *context, int64_t first, int64_t last),
                        void *context) {
  const int parts = *(const int *)self;
  pthread_t threads[16];
  part work[16];
  for (int i = 0; i < parts; i++) {
    work[i] = (part){body, context, count * i * i / (parts * parts), count * (i + 1) * (i + 1) / (parts * parts)};
    if (pthread_create(&threads[i], NULL, run_part, &work[i]) != 0) abort();
  }
  for (int i = 0; i < parts; i++)
    pthread_join(threads[i], NULL);
}

static problem make_problem(void) { return problem_new((shape){2, 3, 1, 300, 120, 33, 1, 0}, DHP_FLOAT16, TRANSPOSED); }

/* Few rows, whose keys are split. */
static problem make_long_problem(void) {
  return problem_new((shape){2, 6, 2, 2, 2 * DHP_SEGMENT_KEYS + 100, 33, 0, 0}, DHP_FLOAT16, TRANSPOSED);
}

static void check_same_bits(problem *p, const dhp_cpu_kernel *kernel, int parts, const unsigned char *expected) {
  const dhp_executor executor = {run_threads, &parts};
  problem_poison(p);
  const dhp_status status = dhp_cpu_forward_with(kernel, &p->args, &p->mask, &executor, NULL);
  check(status == DHP_OK && memcmp(p->out.data, expected, p->out.size) == 0, "%s: %d parts, status %d",
        kernel->instructions, parts, (int)status);
}

/* With so few allocations: an error, and nothing is written. */
static void check_without_memory(problem *p, const dhp_cpu_kernel *kernel, int allocations) {
  memory_left = allocations;
  dhp_error error = {""};
  problem_poison(p);
  const dhp_status status = dhp_cpu_forward_with(kernel, &p->args, &p->mask, NULL, &error);
  size_t written = 0;
  for (size_t i = 0; i < p->out.size; i++)
    written += p->out.data[i] != 0xa5;
  check(status == DHP_OUT_OF_MEMORY && strstr(error.text, "memory") && written == 0,
        "%s, %d allocations: status %d, \"%s\", %zu bytes written", kernel->instructions, allocations, (int)status,
        error.text, written);
  memory_left = INT_MAX;
}

/* needed: allocations without which nothing begins. */
static void check_executors_and_memory(problem p, int needed) {
  unsigned char *const expected = malloc(p.out.size);
  if (!expected) abort();
  for (int k = 0; k < test_kernel_count; k++) {
    const dhp_cpu_kernel *const kernel = &test_kernels[k];
    run_kernel(kernel, &p);
    memcpy(expected, p.out.data, p.out.size);
    for (int parts = 1; parts <= 16; parts += 5)
      check_same_bits(&p, kernel, parts, expected);

    /* Memory for one thread: the others wait for it. */
    memory_left = needed;
    check_same_bits(&p, kernel, 4, expected);
    for (int allocations = 0; allocations < needed; allocations++)
      check_without_memory(&p, kernel, allocations);
  }
  free(expected);
  problem_free(&p);
}

static void test_executors_and_memory(void) {
  check_group("any partition, any memory: the same bits");
  check_executors_and_memory(make_problem(), 1);
  check_executors_and_memory(make_long_problem(), 2);
}

/* ---- executors and memory of gradients --------------------------------------------------------------------------- */

static gradient_problem make_gradients(dhp_dtype dtype) {
  return gradients_new((shape){2, 4, 2, 300, 270, 33, 1, 0}, dtype, TRANSPOSED);
}

static size_t gradients_size(const gradient_problem *p) {
  return p->gradients[0].size + p->gradients[1].size + p->gradients[2].size;
}

/* All three, one behind the other; the caller frees them. */
static unsigned char *copy_gradients(const gradient_problem *p) {
  unsigned char *const copy = malloc(gradients_size(p));
  if (!copy) abort();
  size_t to = 0;
  for (int i = 0; i < 3; to += p->gradients[i++].size)
    memcpy(copy + to, p->gradients[i].data, p->gradients[i].size);
  return copy;
}

static void check_same_gradients(gradient_problem *p, const dhp_cpu_kernel *kernel, const dhp_executor *executor,
                                 const unsigned char *expected, const char *what) {
  gradients_poison(p);
  const dhp_status status = gradients_run(kernel, p, executor);
  unsigned char *const got = copy_gradients(p);
  check(status == DHP_OK && memcmp(got, expected, gradients_size(p)) == 0, "%s, dtype %d: %s, status %d",
        kernel->instructions, (int)p->args.forward.q.dtype, what, (int)status);
  free(got);
}

static void check_gradients_without_memory(gradient_problem *p, const dhp_cpu_kernel *kernel, int allocations) {
  gradients_poison(p);
  memory_left = allocations;
  dhp_error error = {""};
  const dhp_status status = dhp_cpu_backward_with(kernel, &p->args, &p->forward.mask, NULL, &error);
  size_t written = 0;
  for (int i = 0; i < 3; i++)
    for (size_t byte = 0; byte < p->gradients[i].size; byte++)
      written += p->gradients[i].data[byte] != 0xa5;
  check(status == DHP_OUT_OF_MEMORY && strstr(error.text, "memory") && written == 0,
        "%s, %d allocations: status %d, \"%s\", %zu bytes written", kernel->instructions, allocations, (int)status,
        error.text, written);
  memory_left = INT_MAX;
}

/* As the gradients: the same bits by any executor, with memory for one thread and in another state; or an error. */
static void check_sinks_at_run_time(const gradient_problem *p, const dhp_cpu_kernel *kernel) {
  enum { HEADS = 4, PARTS = 4 };
  double sinks[HEADS] = {0}, expected[HEADS], dsinks[HEADS];
  int parts = PARTS;
  const dhp_executor executor = {run_threads, &parts};
  const dhp_sinks_backward args = gradients_of_sinks(p, sinks, dsinks);
  const size_t size = HEADS * (p->args.forward.q.dtype == DHP_FLOAT64 ? sizeof(double) : sizeof(float));
  check(dhp_cpu_sinks_backward_with(kernel, &args, NULL, NULL) == DHP_OK, "%s: sinks", kernel->instructions);
  memcpy(expected, dsinks, size);
  fesetround(FE_UPWARD);
  feclearexcept(FE_ALL_EXCEPT);
  for (int allocations = 0; allocations <= 2; allocations++) {
    const int is_enough = allocations == 2;
    memory_left = allocations;
    memset(dsinks, 0xa5, sizeof dsinks);
    dhp_error error = {""};
    const dhp_status status = dhp_cpu_sinks_backward_with(kernel, &args, &executor, &error);
    memory_left = INT_MAX;
    size_t written = 0;
    for (size_t i = 0; i < size; i++)
      written += ((unsigned char *)dsinks)[i] != 0xa5;
    check(is_enough ? status == DHP_OK && memcmp(dsinks, expected, size) == 0
                    : status == DHP_OUT_OF_MEMORY && strstr(error.text, "memory") && written == 0,
          "%s, sinks of dtype %d, %d allocations: status %d, \"%s\"", kernel->instructions,
          (int)p->args.forward.q.dtype, allocations, (int)status, error.text);
  }
  check(fetestexcept(FE_ALL_EXCEPT) == 0 && fegetround() == FE_UPWARD, "%s, sinks: floating-point state",
        kernel->instructions);
  fesetround(FE_TONEAREST);
}

static void test_gradients_at_run_time(void) {
  check_group("gradients: any partition, memory and state");
  for (int dtype = DHP_FLOAT16; dtype <= DHP_FLOAT64; dtype++) {
    gradient_problem p = make_gradients((dhp_dtype)dtype);
    for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++) {
      const dhp_cpu_kernel *const kernel = &test_kernels[k];
      check(gradients_run(kernel, &p, NULL) == DHP_OK, "%s", kernel->instructions);
      unsigned char *const expected = copy_gradients(&p);
      int parts = 1;
      const dhp_executor executor = {run_threads, &parts};
      for (; parts <= 16; parts += 5)
        check_same_gradients(&p, kernel, &executor, expected, "an executor");
      fesetround(FE_UPWARD);
      feclearexcept(FE_ALL_EXCEPT);
      check_same_gradients(&p, kernel, NULL, expected, "another rounding mode");
      check(fetestexcept(FE_ALL_EXCEPT) == 0 && fegetround() == FE_UPWARD, "%s, dtype %d: floating-point state",
            kernel->instructions, dtype);
      fesetround(FE_TONEAREST);
      if (dtype != DHP_FLOAT64) { /* which needs none */
        parts = 4;
        memory_left = 2;
        check_same_gradients(&p, kernel, &executor, expected, "memory for one thread");
        memory_left = INT_MAX;
        check_gradients_without_memory(&p, kernel, 0);
        check_gradients_without_memory(&p, kernel, 1);
      }
      free(expected);
      check_sinks_at_run_time(&p, kernel);
    }
    gradients_free(&p);
  }
}

/* ---- floating-point state -------------------------------------------------------------------------------------- */

static void test_float_state(void) {
  check_group("the caller's floating-point state");
  problem p = make_problem();
  unsigned char *const expected = malloc(p.out.size);
  if (!expected) abort();
  for (int k = 0; k < test_kernel_count; k++) {
    run_kernel(&test_kernels[k], &p);
    memcpy(expected, p.out.data, p.out.size);
    fesetround(FE_UPWARD);
    feclearexcept(FE_ALL_EXCEPT);
    run_kernel(&test_kernels[k], &p);
    check(fetestexcept(FE_ALL_EXCEPT) == 0, "%s: exception flags %x tell of the data", test_kernels[k].instructions,
          (unsigned)fetestexcept(FE_ALL_EXCEPT));
    check(fegetround() == FE_UPWARD, "%s: rounding mode not restored", test_kernels[k].instructions);
    fesetround(FE_TONEAREST);
    check(memcmp(expected, p.out.data, p.out.size) == 0, "%s: bits depend on the caller's rounding mode",
          test_kernels[k].instructions);
  }
  free(expected);
  problem_free(&p);
}

void test_runtime(void) {
  test_executors_and_memory();
  test_gradients_at_run_time();
  test_float_state();
  check_group("scratch memory is wiped");
  check(freed == allocated && freed > 0, "%d of %d freed", freed, allocated);
  check(dirty == 0, "%d of %d freed with secrets in them", dirty, freed);
}
