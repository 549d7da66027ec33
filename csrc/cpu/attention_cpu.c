/*
 * attention_cpu.c - attention on the CPU: the choice of a tile kernel, and the units of work.
 *
 * Nothing here reads an element of q, k or v.
 */
#include "attention_cpu.h"

#include "float64/float64.h"
#include "split.h"

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

/* ---- units of work ---------------------------------------------------------------------------------------------- */

/* How the query rows of a batch are divided. */
typedef struct division {
  int64_t tiles; /* of one head's rows */
  int64_t group; /* query heads of a key head */
  int64_t heads; /* of these, at most so many in a unit: as many as have few rows together */
  int64_t packs; /* of a group */
} division;

/* Of a call with rows. */
static division division_of(const dhp_attention *args) {
  const int64_t queries = args->q.size[2], tiles = (queries + DHP_CPU_TILE_Q - 1) / DHP_CPU_TILE_Q;
  const int64_t group = args->q.size[1] / args->k.size[1];
  const int64_t most = queries > DHP_CPU_FEW_ROWS ? 1 : DHP_CPU_FEW_ROWS / queries;
  const int64_t heads = group < most ? group : most;
  return (division){tiles, group, heads, (group + heads - 1) / heads};
}

int64_t dhp_cpu_units(const dhp_attention *args) {
  if (args->q.size[1] == 0 || args->q.size[2] == 0) return 0;
  const division d = division_of(args);
  return args->q.size[0] * args->k.size[1] * d.packs * d.tiles;
}

dhp_cpu_rows dhp_cpu_unit(const dhp_attention *args, const dhp_mask *mask, const dhp_cpu_places *places,
                          int64_t index) {
  const division d = division_of(args);
  const int64_t pack = index / d.tiles % d.packs, key_head = index / d.tiles / d.packs;
  const int64_t row = dhp_cpu_tile_at(index % d.tiles, d.tiles) * DHP_CPU_TILE_Q, left = args->q.size[2] - row;
  const int64_t heads = d.group - pack * d.heads < d.heads ? d.group - pack * d.heads : d.heads;
  return (dhp_cpu_rows){.args = args,
                        .mask = mask,
                        .places = places,
                        .batch = key_head / args->k.size[1],
                        .head = key_head % args->k.size[1] * d.group + pack * d.heads,
                        .heads = (int)heads,
                        .first = row,
                        .count = (int)((left < DHP_CPU_TILE_Q ? left : DHP_CPU_TILE_Q) * heads)};
}

/* ---- the forward ------------------------------------------------------------------------------------------------ */

dhp_status dhp_cpu_forward_with(const dhp_cpu_kernel *kernel, const dhp_attention *args, const dhp_mask *mask,
                                const dhp_executor *executor, dhp_error *error) {
  dhp_cpu_call call = {kernel, args, mask, {args->q.size[2], NULL}, NULL};
  const dhp_cpu_split split = dhp_cpu_split_of(args, mask);
  const dhp_status status = dhp_cpu_partials_new(split.partials, &call.partials, error);
  if (status != DHP_OK) return status;
  const dhp_cpu_work work[] = {{dhp_cpu_attend_piece, &call, split.pieces}, {dhp_cpu_fold_pieces, &call, split.folds}};
  const dhp_cpu_extent extent = dhp_cpu_forward_extent(args, args->q.size[2], args->k.size[2]);
  const dhp_status ran = dhp_cpu_run(work, 2, &extent, executor, error);
  dhp_cpu_partials_free(call.partials, split.partials);
  return ran;
}

dhp_status dhp_cpu_forward(const dhp_attention *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_mask mask = dhp_mask_of(args);
  if (args->q.dtype == DHP_FLOAT64) {
    const dhp_cpu_places places = {args->q.size[2], NULL};
    dhp_float64_forward(args, &mask, &places, executor);
    return DHP_OK;
  }
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  return dhp_cpu_forward_with(&kernels[0], args, &mask, executor, error);
}
