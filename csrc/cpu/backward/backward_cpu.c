/*
 * backward_cpu.c - the gradients of attention on the CPU: the units of work, and the two sums a query row that all of
 * them need.
 *
 * Nothing here reads an element of a tensor.
 */
#include "backward_cpu.h"

#include <stdlib.h>

#include "../../ct.h"
#include "../../error.h"
#include "../float64/float64.h"
#include "../tile.h"

typedef struct backward_work {
  const dhp_cpu_kernel *kernel;
  const dhp_backward *args;
  dhp_mask mask;        /* by query, or by key */
  float *lse, *delta;   /* see dhp_cpu_gradient_rows */
  const dhp_tensor *of; /* q or k: whose rows are divided into units */
  int64_t tiles;        /* of one head */
} backward_work;

static int64_t tiles_of(const dhp_tensor *t) { return (t->size[2] + DHP_CPU_TILE_Q - 1) / DHP_CPU_TILE_Q; }

static dhp_cpu_gradient_rows rows_of(const backward_work *work, int64_t index) {
  const int64_t *const size = work->of->size, head = index / work->tiles;
  const int64_t row = dhp_cpu_tile_at(index % work->tiles, work->tiles) * DHP_CPU_TILE_Q, left = size[2] - row;
  return (dhp_cpu_gradient_rows){.args = work->args,
                                 .mask = &work->mask,
                                 .lse = work->lse,
                                 .delta = work->delta,
                                 .batch = head / size[1],
                                 .head = head % size[1],
                                 .first = row,
                                 .count = left < DHP_CPU_TILE_Q ? (int)left : DHP_CPU_TILE_Q};
}

static void sum_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const backward_work *const work = context;
  const dhp_cpu_gradient_rows rows = rows_of(work, index);
  work->kernel->sum_rows(&rows, scratch);
}

static void query_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const backward_work *const work = context;
  const dhp_cpu_gradient_rows rows = rows_of(work, index);
  work->kernel->query_gradient(&rows, scratch);
}

static void key_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const backward_work *const work = context;
  const dhp_cpu_gradient_rows rows = rows_of(work, index);
  work->kernel->key_gradients(&rows, scratch);
}

dhp_status dhp_cpu_backward_with(const dhp_cpu_kernel *kernel, const dhp_backward *args, const dhp_mask *mask,
                                 const dhp_executor *executor, dhp_error *error) {
  const dhp_tensor *const q = &args->forward.q, *const k = &args->forward.k;
  const size_t alignment = 64, query_rows = (size_t)(q->size[0] * q->size[1] * q->size[2]); /* 64: a cache line */
  const size_t size = (2 * query_rows * sizeof(float) / alignment + 1) * alignment;
  float *const sums = aligned_alloc(alignment, size);
  if (!sums) return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for two sums a query row, %zu bytes", size);

  const backward_work queries = {kernel, args, *mask, sums, sums + query_rows, q, tiles_of(q)};
  const backward_work keys = {kernel, args, dhp_mask_transposed(mask), sums, sums + query_rows, k, tiles_of(k)};
  const int64_t query_tiles = q->size[0] * q->size[1] * queries.tiles, key_tiles = k->size[0] * k->size[1] * keys.tiles;
  const dhp_cpu_work work[] = {{sum_tile, &queries, query_tiles},
                               {query_tile, &queries, args->dq.data ? query_tiles : 0},
                               {key_tile, &keys, args->dk.data || args->dv.data ? key_tiles : 0}};
  const dhp_cpu_extent extent = {q->size[2], k->size[2], dhp_cpu_most_dims(&args->forward), 1, 0};
  const dhp_status status = dhp_cpu_run(work, 3, &extent, executor, error);
  dhp_ct_wipe(sums, size);
  free(sums);
  return status;
}

dhp_status dhp_cpu_backward(const dhp_backward *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_mask mask = dhp_mask_of(&args->forward);
  if (args->forward.q.dtype == DHP_FLOAT64) {
    dhp_float64_backward(args, &mask, executor);
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_backward_with(&kernels[0], args, &mask, executor, error);
}
