/*
 * backward_cpu.c - the gradients of attention on the CPU, of one call or many: the units of work, and the two sums a
 * query row that all of them need.
 *
 * Nothing here reads an element of a tensor.
 */
#include "backward_cpu.h"

#include <stdlib.h>

#include "../../ct.h"
#include "../../error.h"
#include "../float64/float64.h"
#include "calls.h"

/* Whose rows are divided into units. */
typedef enum side { QUERIES, KEYS } side;

typedef struct backward_work {
  const dhp_cpu_kernel *kernel;
  const dhp_cpu_gradient_calls *calls;
  float *lse, *delta;        /* see dhp_cpu_gradient_rows */
  const int64_t *first_unit; /* of each call; then the number of all */
  side of;
} backward_work;

static dhp_cpu_gradient_call call_of(const dhp_cpu_gradient_calls *calls, int64_t index) {
  return calls->call(calls->context, index);
}

static int64_t tiles_of(const dhp_tensor *t) { return (t->size[2] + DHP_CPU_TILE_Q - 1) / DHP_CPU_TILE_Q; }

static int64_t units_of(const dhp_tensor *t) { return t->size[0] * t->size[1] * tiles_of(t); }

typedef void (*compute_rows)(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch);

static void run_unit(const backward_work *work, int64_t index, compute_rows compute, dhp_cpu_scratch *scratch) {
  const int64_t place = dhp_cpu_call_at(work->first_unit, work->calls->count, index);
  const dhp_cpu_gradient_call call = call_of(work->calls, place);
  const dhp_tensor *const of = work->of == QUERIES ? &call.args.forward.q : &call.args.forward.k;
  const dhp_mask mask = work->of == QUERIES ? call.mask : dhp_mask_transposed(&call.mask);
  const int64_t tiles = tiles_of(of), unit = index - work->first_unit[place], head = unit / tiles;
  const int64_t row = dhp_cpu_tile_at(unit % tiles, tiles) * DHP_CPU_TILE_Q, left = of->size[2] - row;
  const dhp_cpu_gradient_rows rows = {.args = &call.args,
                                      .mask = &mask,
                                      .lse = work->lse + call.first_lse_row,
                                      .delta = work->delta + call.first_lse_row,
                                      .lse_pitch = call.lse_pitch,
                                      .batch = head / of->size[1],
                                      .head = head % of->size[1],
                                      .first = row,
                                      .count = left < DHP_CPU_TILE_Q ? (int)left : DHP_CPU_TILE_Q};
  compute(&rows, scratch);
}

static void sum_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const backward_work *const work = context;
  run_unit(work, index, work->kernel->sum_rows, scratch);
}

static void query_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const backward_work *const work = context;
  run_unit(work, index, work->kernel->query_gradient, scratch);
}

static void key_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const backward_work *const work = context;
  run_unit(work, index, work->kernel->key_gradients, scratch);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where the units of each call begin, of queries and of keys; and the lengths of the longest. */
static dhp_cpu_extent lay_out(const dhp_cpu_gradient_calls *calls, int64_t *first_query, int64_t *first_key) {
  dhp_cpu_extent extent = {.is_backward = 1};
  first_query[0] = first_key[0] = 0;
  for (int64_t i = 0; i < calls->count; i++) {
    const dhp_cpu_gradient_call call = call_of(calls, i);
    const dhp_tensor *const q = &call.args.forward.q, *const k = &call.args.forward.k;
    first_query[i + 1] = first_query[i] + units_of(q);
    first_key[i + 1] = first_key[i] + units_of(k);
    extent.queries = larger(extent.queries, q->size[2]);
    extent.keys = larger(extent.keys, k->size[2]);
    extent.head_dim = dhp_cpu_most_dims(&call.args.forward);
  }
  return extent;
}

dhp_status dhp_cpu_gradients_of_calls(const dhp_cpu_kernel *kernel, const dhp_cpu_gradient_calls *calls,
                                      const dhp_executor *executor, dhp_error *error) {
  const int64_t n = calls->count;
  const size_t rows = (size_t)calls->lse_rows;
  size_t size;
  float *const sums = dhp_cpu_lines_new(2 * rows * sizeof *sums, &size);
  int64_t *const first_unit = malloc(2 * (size_t)(n + 1) * sizeof *first_unit);
  dhp_status status = DHP_OK;
  if (!sums || !first_unit) {
    status = dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for two sums a query row, %zu bytes, and %lld lengths", size,
                      (long long)n);
  } else {
    int64_t *const first_query = first_unit, *const first_key = first_unit + n + 1;
    const dhp_cpu_extent extent = lay_out(calls, first_query, first_key);
    const dhp_backward wanted = call_of(calls, 0).args;
    const backward_work queries = {kernel, calls, sums, sums + rows, first_query, QUERIES};
    const backward_work keys = {kernel, calls, sums, sums + rows, first_key, KEYS};
    const dhp_cpu_work work[] = {{sum_tile, &queries, first_query[n]},
                                 {query_tile, &queries, wanted.dq.data ? first_query[n] : 0},
                                 {key_tile, &keys, wanted.dk.data || wanted.dv.data ? first_key[n] : 0}};
    status = dhp_cpu_run(work, 3, &extent, executor, error);
    dhp_ct_wipe(sums, size);
  }
  free(first_unit);
  free(sums);
  return status;
}

/* ---- one call --------------------------------------------------------------------------------------------------- */

static dhp_cpu_gradient_call itself(const void *call, int64_t index) {
  (void)index;
  return *(const dhp_cpu_gradient_call *)call;
}

dhp_status dhp_cpu_backward_with(const dhp_cpu_kernel *kernel, const dhp_backward *args, const dhp_mask *mask,
                                 const dhp_executor *executor, dhp_error *error) {
  const int64_t *const size = args->forward.q.size;
  const dhp_cpu_gradient_call call = {*args, *mask, size[2], 0};
  const dhp_cpu_gradient_calls alone = {itself, &call, 1, size[0] * size[1] * size[2]};
  return dhp_cpu_gradients_of_calls(kernel, &alone, executor, error);
}

dhp_status dhp_cpu_backward(const dhp_backward *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_mask mask = dhp_mask_of(&args->forward);
  if (args->forward.q.dtype == DHP_FLOAT64) {
    dhp_float64_backward(args, &mask, args->forward.q.size[2], executor);
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_backward_with(&kernels[0], args, &mask, executor, error);
}
