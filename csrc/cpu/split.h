/*
 * split.h - the keys of few query rows, split over threads: by segments (segments.h), so that no bit depends on it.
 *
 * Between pieces and folds a call keeps a dhp_cpu_partial, some 4 KB, of each piece: less than a hundredth of the
 * segment's keys and values in float16 at D = 64.
 */
#ifndef DHP_CPU_SPLIT_H
#define DHP_CPU_SPLIT_H

#include "tile.h"

/* A call, or one sequence of a packed call. */
typedef struct dhp_cpu_call {
  const dhp_cpu_kernel *kernel;
  const dhp_attention *args;
  const dhp_mask *mask;
  dhp_cpu_places places;
  dhp_cpu_partial *partials; /* its first */
} dhp_cpu_call;

/*
 * The work of a call: all pieces, and then the folds. A unit is one piece; or, of few rows that see more keys than a
 * segment has, a piece for each segment, and a fold of them. Shape and mask alone decide, not who is there to compute.
 */
typedef struct dhp_cpu_split {
  int64_t pieces, partials, folds; /* partials: as many as pieces, or none; folds: as many as units, or none */
} dhp_cpu_split;

dhp_cpu_split dhp_cpu_split_of(const dhp_attention *args, const dhp_mask *mask);

/* dhp_cpu_work.unit of a dhp_cpu_call: of its pieces, and of its folds. */
void dhp_cpu_attend_piece(const void *call, int64_t index, dhp_cpu_scratch *scratch);
void dhp_cpu_fold_pieces(const void *call, int64_t index, dhp_cpu_scratch *scratch);

/* Memory for what pieces hand to folds; NULL for none. Fails with DHP_OUT_OF_MEMORY alone. */
dhp_status dhp_cpu_partials_new(int64_t count, dhp_cpu_partial **partials, dhp_error *error);
/* Wipes and frees them. */
void dhp_cpu_partials_free(dhp_cpu_partial *partials, int64_t count);

#endif
