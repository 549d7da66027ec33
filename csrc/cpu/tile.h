/*
 * tile.h - what attention_cpu.c asks of a tile kernel: one tile of query rows of one head, against all its keys.
 *
 * The kernel is one source, tile_impl.h, compiled once per instruction set (tile_*.c).
 */
#ifndef DHP_CPU_TILE_H
#define DHP_CPU_TILE_H

#include "../mask.h"

enum {
  DHP_CPU_TILE_Q = 128, /* query rows: changes no bit of the result */
  DHP_CPU_TILE_K = 96,  /* keys a step: sums over keys are grouped by it, so the bits depend on it */
  DHP_CPU_TILE_D = 64,  /* inner products are grouped by it: it keeps a block of q in the first-level cache */
  DHP_CPU_MAX_D = 256,
  /* Pitch of scratch rows: 16 floats (a cache line) more than a power of two, or rows would share cache sets. */
  DHP_CPU_PITCH_D = DHP_CPU_MAX_D + 16,
  DHP_CPU_PITCH_Q = DHP_CPU_TILE_Q + 16
};

/* Working memory of one thread; all of it may hold secrets. Rows are indexed by d, key or query as the names say. */
typedef struct dhp_cpu_scratch {
  float q[DHP_CPU_MAX_D][DHP_CPU_PITCH_Q];        /* q scaled and transposed: a vector holds one d of many queries */
  float k[DHP_CPU_TILE_K][DHP_CPU_PITCH_D];       /* [key][d] */
  float v[DHP_CPU_TILE_K][DHP_CPU_PITCH_D];       /* [key][d] */
  float p[DHP_CPU_TILE_K][DHP_CPU_PITCH_Q];       /* scores, then probabilities: [key][query] */
  float out[DHP_CPU_TILE_Q][DHP_CPU_PITCH_D];     /* sum of p v: [query][d] */
  float partial[DHP_CPU_TILE_Q][DHP_CPU_PITCH_D]; /* the present key tile's part of it */
  float maximum[DHP_CPU_TILE_Q];                  /* running maximum of the scores, which come in units of log(2) */
  float sum[DHP_CPU_TILE_Q];                      /* sum of p */
  float rescale[DHP_CPU_TILE_Q];                  /* 2^(old maximum - new maximum) */
  float lse[DHP_CPU_TILE_Q];
  float edge[16]; /* the vector in which a row of q, k, v or out ends: 64 bytes */
} dhp_cpu_scratch;

/* One unit of work. All of it is public. */
typedef struct dhp_cpu_rows {
  const dhp_attention *args;
  const dhp_mask *mask;
  int64_t batch, head; /* of q */
  int64_t first;       /* query row */
  int count;           /* 1 to DHP_CPU_TILE_Q */
} dhp_cpu_rows;

typedef struct dhp_cpu_kernel {
  const char *instructions;
  /* Writes out and lse of these rows. CT: control flow and addresses depend on *rows alone. */
  void (*attend)(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch);
} dhp_cpu_kernel;

#if defined(__x86_64__)
void dhp_cpu_attend_avx512(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch);
void dhp_cpu_attend_avx2(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch);
#endif
void dhp_cpu_attend_baseline(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch);

/* The kernels this CPU can run, best first, and how many (1 to 3); dhp_cpu_forward uses the first. */
int dhp_cpu_kernels(dhp_cpu_kernel kernels[3]);

/* dhp_cpu_forward with a chosen kernel, and any mask of the call's lengths in place of the one that args ask for. */
dhp_status dhp_cpu_forward_with(const dhp_cpu_kernel *kernel, const dhp_attention *args, const dhp_mask *mask,
                                const dhp_executor *executor, dhp_error *error);

#endif
