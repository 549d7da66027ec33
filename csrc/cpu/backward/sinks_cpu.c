/*
 * sinks_cpu.c - the gradient of sinks on the CPU: a unit of work for each tile of query rows, and then one for each
 * head, which adds up its tiles.
 *
 * Nothing here reads an element of a tensor.
 */
#include <stdlib.h>

#include "../../error.h"
#include "../float64/float64.h"
#include "../float64/numbers.h"
#include "../tile.h"
#include "backward_cpu.h"

typedef struct sinks_work {
  const dhp_cpu_kernel *kernel;
  const dhp_backward *rows; /* what kernels read of */
  void *dsinks;
  double *sums;  /* of each tile: [head][batch][tile] */
  int64_t tiles; /* of one head's rows */
} sinks_work;

static void sum_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const sinks_work *const work = context;
  const dhp_tensor *const out = &work->rows->forward.out;
  const int64_t row = index % work->tiles * DHP_CPU_TILE_Q, left = out->size[2] - row, head = index / work->tiles;
  const dhp_cpu_gradient_rows rows = {.args = work->rows,
                                      .lse_pitch = out->size[2],
                                      .batch = head % out->size[0],
                                      .head = head / out->size[0],
                                      .first = row,
                                      .count = left < DHP_CPU_TILE_Q ? (int)left : DHP_CPU_TILE_Q};
  work->sums[index] = out->dtype == DHP_FLOAT64
                          ? dhp_float64_sink_gradient(rows.args, rows.batch, rows.head, rows.first, rows.count)
                          : work->kernel->sink_gradient(&rows, scratch);
}

/* CT: straight-line but for the public number of tiles, and dtype. */
static void sum_head(const void *context, int64_t head, dhp_cpu_scratch *scratch) {
  const sinks_work *const work = context;
  const dhp_tensor *const out = &work->rows->forward.out;
  const int64_t tiles = out->size[0] * work->tiles;
  double sum = 0.;
  (void)scratch;
  for (int64_t i = head * tiles; i < (head + 1) * tiles; i++)
    sum += work->sums[i];
  if (out->dtype == DHP_FLOAT64)
    ((double *)work->dsinks)[head] = dhp_ct64_canonical(sum);
  else
    ((float *)work->dsinks)[head] = dhp_ct_canonical((float)sum);
}

dhp_status dhp_cpu_sinks_backward_with(const dhp_cpu_kernel *kernel, const dhp_sinks_backward *args,
                                       const dhp_executor *executor, dhp_error *error) {
  const int64_t *const size = args->out.size;
  const dhp_backward rows = {.forward.q = args->out, /* of which the sizes are read */
                             .forward.out = args->out,
                             .forward.lse = (void *)args->lse,
                             .forward.sinks = args->sinks,
                             .grad_out = args->grad_out,
                             .grad_lse = args->grad_lse};
  sinks_work work = {.kernel = kernel,
                     .rows = &rows,
                     .dsinks = args->dsinks,
                     .tiles = (size[2] + DHP_CPU_TILE_Q - 1) / DHP_CPU_TILE_Q};
  const int64_t units = size[0] * size[1] * work.tiles;
  size_t bytes;
  work.sums = dhp_cpu_lines_new((size_t)units * sizeof *work.sums, &bytes);
  if (!work.sums) return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for the sums of rows, %zu bytes", bytes);
  const dhp_cpu_work kinds[] = {{sum_tile, &work, units}, {sum_head, &work, size[1]}};
  const dhp_cpu_extent extent = {.is_backward = 1}; /* without a tile of q, k or v */
  const dhp_status status = dhp_cpu_run(kinds, 2, &extent, executor, error);
  dhp_ct_wipe(work.sums, bytes);
  free(work.sums);
  return status;
}

dhp_status dhp_cpu_sinks_backward(const dhp_sinks_backward *args, const dhp_executor *executor, dhp_error *error) {
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_sinks_backward_with(&kernels[0], args, executor, error);
}
