/*
 * attention_cpu.c - attention on the CPU: the choice of a tile kernel, the partition of the work, the scratch memory.
 *
 * Nothing here reads an element of q, k or v.
 */
#include "attention_cpu.h"

#include <pthread.h>
#include <stdlib.h>

#include "../ct.h"
#include "../error.h"
#include "float64/float64.h"
#include "float_mode.h"
#include "tile.h"

int dhp_cpu_kernels(dhp_cpu_kernel kernels[3]) {
  int n = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    kernels[n++] = (dhp_cpu_kernel){"avx512", dhp_cpu_attend_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    kernels[n++] = (dhp_cpu_kernel){"avx2", dhp_cpu_attend_avx2};
#endif
  kernels[n++] = (dhp_cpu_kernel){"baseline", dhp_cpu_attend_baseline};
  return n;
}

/* ---- scratch memory -------------------------------------------------------------------------------------------- */

static dhp_cpu_scratch *scratch_new(void) {
  const size_t alignment = 64, size = (sizeof(dhp_cpu_scratch) + alignment - 1) / alignment * alignment;
  return aligned_alloc(alignment, size); /* 64: a cache line, the widest vector */
}

enum { MOST_LANES = 16 }; /* floats of the widest vector */

/* Of the first so many rows of q or p, which have a column for each query. */
static void wipe_queries(float (*rows)[DHP_CPU_PITCH_Q], size_t count, size_t queries) {
  const size_t columns = (queries + MOST_LANES - 1) / MOST_LANES * MOST_LANES;
  for (size_t i = 0; i < count; i++)
    dhp_ct_wipe(rows[i], columns * sizeof *rows[i]);
}

/* Wipes what a problem of this (public) size can have written, and frees it. */
static void scratch_free(dhp_cpu_scratch *scratch, const dhp_attention *args) {
  const int64_t queries = args->q.size[2], keys = args->k.size[2], head_dim = args->q.size[3];
  const size_t query_rows = queries < DHP_CPU_TILE_Q ? (size_t)queries : DHP_CPU_TILE_Q;
  const size_t key_rows = keys < DHP_CPU_TILE_K ? (size_t)keys : DHP_CPU_TILE_K;
  const size_t score_rows = (key_rows + 11) / 12 * 12; /* scores are computed for 6 keys at a time, P for 4 */
  wipe_queries(scratch->q, (size_t)head_dim, query_rows);
  dhp_ct_wipe(scratch->k, key_rows * sizeof *scratch->k);
  dhp_ct_wipe(scratch->v, key_rows * sizeof *scratch->v);
  wipe_queries(scratch->p, score_rows, query_rows);
  dhp_ct_wipe(scratch->out, query_rows * sizeof *scratch->out);
  dhp_ct_wipe(scratch->partial, query_rows * sizeof *scratch->partial);
  dhp_ct_wipe(scratch->maximum, sizeof *scratch - offsetof(dhp_cpu_scratch, maximum)); /* all that follows */
  free(scratch);
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

typedef struct cpu_job {
  const dhp_attention *args;
  const dhp_mask *mask;
  const dhp_cpu_kernel *kernel;
  int64_t tiles;            /* of query rows, in one head */
  dhp_cpu_scratch *reserve; /* allocated before any output is written, so that no body can run out of memory */
  pthread_mutex_t lock;     /* of the reserve */
} cpu_job;

/* Tiles [first, last) of all heads and batches. */
static void attend_tiles(const cpu_job *job, int64_t first, int64_t last, dhp_cpu_scratch *scratch) {
  const dhp_tensor *const q = &job->args->q;
  const dhp_float_mode mode = dhp_float_mode_enter();
  for (int64_t i = first; i < last; i++) {
    const int64_t head = i / job->tiles, step = i % job->tiles;
    /* First, last, second, last but one, ...: causal rows cost more the later they are, this evens a partition out. */
    const int64_t tile = step % 2 ? job->tiles - 1 - step / 2 : step / 2;
    const int64_t row = tile * DHP_CPU_TILE_Q, left = q->size[2] - row;
    const dhp_cpu_rows rows = {.args = job->args,
                               .mask = job->mask,
                               .batch = head / q->size[1],
                               .head = head % q->size[1],
                               .first = row,
                               .count = left < DHP_CPU_TILE_Q ? (int)left : DHP_CPU_TILE_Q};
    job->kernel->attend(&rows, scratch);
  }
  dhp_float_mode_leave(mode);
}

/* The executor's body: takes the reserve if it is free, else memory of its own, else waits for the reserve. */
static void body(void *context, int64_t first, int64_t last) {
  cpu_job *const job = context;
  dhp_cpu_scratch *own = NULL;
  if (pthread_mutex_trylock(&job->lock) != 0) {
    own = scratch_new();
    if (!own) pthread_mutex_lock(&job->lock);
  }
  attend_tiles(job, first, last, own ? own : job->reserve);
  if (own)
    scratch_free(own, job->args);
  else
    pthread_mutex_unlock(&job->lock);
}

dhp_status dhp_cpu_forward_with(const dhp_cpu_kernel *kernel, const dhp_attention *args, const dhp_mask *mask,
                                const dhp_executor *executor, dhp_error *error) {
  const dhp_tensor *const q = &args->q;
  cpu_job job = {.args = args,
                 .mask = mask,
                 .kernel = kernel,
                 .tiles = (q->size[2] + DHP_CPU_TILE_Q - 1) / DHP_CPU_TILE_Q,
                 .reserve = scratch_new(),
                 .lock = PTHREAD_MUTEX_INITIALIZER};
  if (!job.reserve)
    return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for a scratch tile of %zu bytes", sizeof(dhp_cpu_scratch));

  const int64_t count = q->size[0] * q->size[1] * job.tiles;
  if (executor)
    executor->run(executor->self, count, body, &job);
  else
    body(&job, 0, count);

  pthread_mutex_destroy(&job.lock);
  scratch_free(job.reserve, args);
  return DHP_OK;
}

dhp_status dhp_cpu_forward(const dhp_attention *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_mask mask = dhp_mask_of(args);
  if (args->q.dtype == DHP_FLOAT64) {
    dhp_float64_forward(args, &mask, executor);
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_forward_with(&kernels[0], args, &mask, executor, error);
}
