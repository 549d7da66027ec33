/*
 * attention_cpu.c - attention on the CPU: the choice of a tile kernel, and the units of work.
 *
 * Nothing here reads an element of q, k or v.
 */
#include "attention_cpu.h"

#include "float64/float64.h"
#include "tile.h"

int dhp_cpu_kernels(dhp_cpu_kernel kernels[3]) {
  int n = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    kernels[n++] = dhp_cpu_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels[n++] = dhp_cpu_avx2;
#endif
  kernels[n++] = dhp_cpu_baseline;
  return n;
}

typedef struct forward_work {
  const dhp_cpu_kernel *kernel;
  const dhp_attention *args;
  const dhp_mask *mask;
  int64_t tiles; /* of query rows, in one head */
} forward_work;

static void attend_tile(const void *context, int64_t index, dhp_cpu_scratch *scratch) {
  const forward_work *const work = context;
  const dhp_tensor *const q = &work->args->q;
  const int64_t head = index / work->tiles;
  const int64_t row = dhp_cpu_tile_at(index % work->tiles, work->tiles) * DHP_CPU_TILE_Q, left = q->size[2] - row;
  const dhp_cpu_rows rows = {.args = work->args,
                             .mask = work->mask,
                             .batch = head / q->size[1],
                             .head = head % q->size[1],
                             .first = row,
                             .count = left < DHP_CPU_TILE_Q ? (int)left : DHP_CPU_TILE_Q};
  work->kernel->attend(&rows, scratch);
}

dhp_status dhp_cpu_forward_with(const dhp_cpu_kernel *kernel, const dhp_attention *args, const dhp_mask *mask,
                                const dhp_executor *executor, dhp_error *error) {
  const dhp_tensor *const q = &args->q;
  const forward_work context = {kernel, args, mask, (q->size[2] + DHP_CPU_TILE_Q - 1) / DHP_CPU_TILE_Q};
  const dhp_cpu_work work = {attend_tile, &context, q->size[0] * q->size[1] * context.tiles};
  const dhp_cpu_extent extent = {.queries = q->size[2], .keys = args->k.size[2], .head_dim = q->size[3]};
  return dhp_cpu_run(&work, 1, &extent, executor, error);
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
