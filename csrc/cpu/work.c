/*
 * work.c - runs units of work: their partition, the scratch memory of every thread, the floating-point state.
 *
 * Nothing here reads an element of a tensor.
 */
#include <pthread.h>
#include <stdlib.h>

#include "../ct.h"
#include "../error.h"
#include "float_mode.h"
#include "tile.h"

/* ---- scratch memory -------------------------------------------------------------------------------------------- */

void *dhp_cpu_lines_new(size_t bytes, size_t *size) {
  const size_t line = 64; /* a cache line, the widest vector */
  *size = (bytes + (bytes == 0) + line - 1) / line * line;
  return aligned_alloc(line, *size);
}

static dhp_cpu_scratch *scratch_new(void) {
  size_t size;
  return dhp_cpu_lines_new(sizeof(dhp_cpu_scratch), &size);
}

enum { MOST_LANES = 16 }; /* floats of the widest vector */

/* Of the first so many rows of q, g, p or ds, which have a column for each query. */
static void wipe_queries(float (*rows)[DHP_CPU_PITCH_Q], size_t count, size_t queries) {
  const size_t columns = (queries + MOST_LANES - 1) / MOST_LANES * MOST_LANES;
  for (size_t i = 0; i < count; i++)
    dhp_ct_wipe(rows[i], columns * sizeof *rows[i]);
}

static size_t at_most(int64_t n, size_t most) { return n < (int64_t)most ? (size_t)n : most; }

/* What tiles of few rows write, of which every forward can have some. */
static void wipe_few(dhp_cpu_scratch *scratch, const dhp_cpu_extent *extent) {
  if (extent->is_folded) dhp_ct_wipe(scratch->folded, DHP_CPU_FEW_ROWS * sizeof *scratch->folded);
  dhp_ct_wipe(scratch->k, DHP_CPU_FEW_ROWS * sizeof *scratch->k);
  wipe_queries(scratch->ds, DHP_CPU_FEW_ROWS, at_most(extent->keys, DHP_CPU_TILE_K));
  dhp_ct_wipe(scratch->out, DHP_CPU_FEW_ROWS * sizeof *scratch->out);
}

static void wipe_tiles(dhp_cpu_scratch *scratch, const dhp_cpu_extent *extent) {
  /* in a backward either can be in the other's place */
  const int64_t longest = extent->queries > extent->keys ? extent->queries : extent->keys;
  const size_t head_dim = (size_t)extent->head_dim;
  const size_t query_rows = at_most(extent->is_backward ? longest : extent->queries, DHP_CPU_TILE_Q);
  const size_t key_rows = at_most(extent->is_backward ? longest : extent->keys, DHP_CPU_TILE_K);
  const size_t score_rows = (key_rows + 11) / 12 * 12; /* scores are computed for 6 keys at a time, P for 4 */
  wipe_queries(scratch->q, head_dim, query_rows);
  dhp_ct_wipe(scratch->k, key_rows * sizeof *scratch->k);
  dhp_ct_wipe(scratch->v, key_rows * sizeof *scratch->v);
  wipe_queries(scratch->p, score_rows, query_rows);
  dhp_ct_wipe(scratch->out, query_rows * sizeof *scratch->out);
  dhp_ct_wipe(scratch->partial, query_rows * sizeof *scratch->partial);
  if (extent->is_backward) {
    wipe_queries(scratch->g, head_dim, query_rows);
    wipe_queries(scratch->ds, score_rows, query_rows);
    dhp_ct_wipe(scratch->dv, query_rows * sizeof *scratch->dv);
  } else if (extent->is_folded) {
    dhp_ct_wipe(scratch->folded, query_rows * sizeof *scratch->folded);
  }
}

/* Wipes what a problem of this (public) size can have written, and frees it. */
static void scratch_free(dhp_cpu_scratch *scratch, const dhp_cpu_extent *extent) {
  if (!extent->is_backward) wipe_few(scratch, extent);
  if (extent->is_backward || extent->queries > DHP_CPU_FEW_ROWS) wipe_tiles(scratch, extent);
  dhp_ct_wipe(scratch->maximum, sizeof *scratch - offsetof(dhp_cpu_scratch, maximum)); /* all that follows */
  free(scratch);
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

/* The last that begins no later: those before it that begin there have no unit. */
int64_t dhp_cpu_call_at(const int64_t *first_unit, int64_t calls, int64_t unit) {
  int64_t low = 0, high = calls;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first_unit[middle] <= unit)
      low = middle;
    else
      high = middle;
  }
  return low;
}

typedef struct cpu_job {
  const dhp_cpu_work *work;
  const dhp_cpu_extent *extent;
  dhp_cpu_scratch *reserve; /* allocated before any output is written, so that no body can run out of memory */
  pthread_mutex_t lock;     /* of the reserve */
} cpu_job;

/* The executor's body: takes the reserve if it is free, else memory of its own, else waits for the reserve. */
static void body(void *context, int64_t first, int64_t last) {
  cpu_job *const job = context;
  dhp_cpu_scratch *own = NULL;
  if (pthread_mutex_trylock(&job->lock) != 0) {
    own = scratch_new();
    if (!own) pthread_mutex_lock(&job->lock);
  }
  const dhp_float_mode mode = dhp_float_mode_enter();
  for (int64_t i = first; i < last; i++)
    job->work->unit(job->work->context, i, own ? own : job->reserve);
  dhp_float_mode_leave(mode);
  if (own)
    scratch_free(own, job->extent);
  else
    pthread_mutex_unlock(&job->lock);
}

dhp_status dhp_cpu_run(const dhp_cpu_work *work, int n, const dhp_cpu_extent *extent, const dhp_executor *executor,
                       dhp_error *error) {
  cpu_job job = {.extent = extent, .reserve = scratch_new(), .lock = PTHREAD_MUTEX_INITIALIZER};
  if (!job.reserve)
    return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for a scratch tile of %zu bytes", sizeof(dhp_cpu_scratch));
  for (int i = 0; i < n; i++) {
    job.work = &work[i];
    if (work[i].count == 0) continue;
    if (executor)
      executor->run(executor->self, work[i].count, body, &job);
    else
      body(&job, 0, work[i].count);
  }
  pthread_mutex_destroy(&job.lock);
  scratch_free(job.reserve, extent);
  return DHP_OK;
}
