/*
 * tile.h - what attention_cpu.c asks of a tile kernel: one tile of query rows of one head, against all its keys.
 *
 * The kernel is one source, tile_impl.h, compiled once per instruction set (tile_*.c).
 */
#ifndef DHP_CPU_TILE_H
#define DHP_CPU_TILE_H

#include "places.h"
#include "segments.h"

enum {
  DHP_CPU_TILE_Q = 128, /* query rows: changes no bit but of the gradient of sinks, whose sums over rows it groups */
  DHP_CPU_TILE_K = 96,  /* keys a step: sums over keys are grouped by it, so the bits depend on it */
  DHP_CPU_TILE_D = 64,  /* inner products are grouped by it: it keeps a block of q in the first-level cache */
  /* Query rows, of several heads if those of one are fewer, that are attended to with keys in the lanes (tile_few.h):
   * changes no bit. Four share the cost of a vector of keys; more would leave fewer units to other threads. */
  DHP_CPU_FEW_ROWS = 4,
  DHP_CPU_RUN = 16, /* keys, from a multiple of it on, that lie one behind the other: the smallest page holds as many */
  DHP_CPU_MAX_D = 256,
  /* Pitch of scratch rows: 16 floats (a cache line) more than a power of two, or rows would share cache sets. */
  DHP_CPU_PITCH_D = DHP_CPU_MAX_D + 16,
  DHP_CPU_PITCH_Q = DHP_CPU_TILE_Q + 16
};

/*
 * Working memory of one thread; all of it may hold secrets. Rows are indexed by d, key or query as the names say; where
 * a backward computes gradients of keys, keys and queries have changed places, and so have k and q, v and grad_out.
 * They have in the scores of few query rows (tile_few.h), too: then q holds keys, k queries, and ds scores as
 * [row][key].
 */
typedef struct dhp_cpu_scratch {
  float q[DHP_CPU_MAX_D][DHP_CPU_PITCH_Q];        /* q scaled and transposed: a vector holds one d of many queries */
  float k[DHP_CPU_TILE_K][DHP_CPU_PITCH_D];       /* [key][d] */
  float v[DHP_CPU_TILE_K][DHP_CPU_PITCH_D];       /* [key][d] */
  float p[DHP_CPU_TILE_K][DHP_CPU_PITCH_Q];       /* scores, then probabilities: [key][query] */
  float out[DHP_CPU_TILE_Q][DHP_CPU_PITCH_D];     /* sum of p v: [query][d] */
  float partial[DHP_CPU_TILE_Q][DHP_CPU_PITCH_D]; /* the present key tile's part of it */
  float g[DHP_CPU_MAX_D][DHP_CPU_PITCH_Q];        /* backward: grad_out transposed */
  float ds[DHP_CPU_TILE_K][DHP_CPU_PITCH_Q];      /* backward: grad_out v, then the gradient of the scores */
  float dv[DHP_CPU_TILE_Q][DHP_CPU_PITCH_D];      /* backward: dv, beside dk in out */
  float folded[DHP_CPU_TILE_Q][DHP_CPU_PITCH_D];  /* out of all segments so far, where rows see several */
  float maximum[DHP_CPU_TILE_Q];                  /* running maximum of the scores, which come in units of log(2) */
  float sum[DHP_CPU_TILE_Q];                      /* sum of p */
  float rescale[DHP_CPU_TILE_Q];                  /* 2^(old maximum - new maximum) */
  float folded_maximum[DHP_CPU_TILE_Q];           /* as maximum and sum, of all segments so far */
  float folded_sum[DHP_CPU_TILE_Q];
  float weight[DHP_CPU_TILE_Q]; /* what a segment's sums are multiplied with in their fold */
  float lse[DHP_CPU_TILE_Q];
  float delta[DHP_CPU_TILE_Q];
  float edge[16]; /* the vector in which a row of q, k, v or out ends: 64 bytes */
} dhp_cpu_scratch;

/* One unit of work. All of it is public. */
typedef struct dhp_cpu_rows {
  const dhp_attention *args;
  const dhp_mask *mask;
  const dhp_cpu_places *places;
  int64_t batch, head; /* of q: the first head */
  int heads;           /* so many, of one key head; 1 where there are more than DHP_CPU_FEW_ROWS rows */
  int64_t first;       /* query row of each head */
  int count;           /* of all heads: 1 to DHP_CPU_TILE_Q */
} dhp_cpu_rows;

/* What few rows' chains over one segment come to: what a scratch holds of them. Secret. */
typedef struct dhp_cpu_partial {
  float maximum[16], sum[16]; /* a vector of the widest */
  float out[DHP_CPU_FEW_ROWS][DHP_CPU_MAX_D];
} dhp_cpu_partial;

/* One unit of work of a backward: rows of a query head, or of a key head. All of it is public but what lies behind. */
typedef struct dhp_cpu_gradient_rows {
  const dhp_backward *args;
  const dhp_mask *mask; /* what a query sees for rows of a query head; what sees a key for rows of a key head */
  float *lse, *delta;   /* of the forward, NaN where it is not finite; rowsum(grad_out * out) - grad_lse */
  int64_t lse_pitch;    /* rows of these, as of the lse and grad_lse of args, from a head to the next */
  int64_t batch, head, first;
  int count; /* 1 to DHP_CPU_TILE_Q */
} dhp_cpu_gradient_rows;

/* CT, all functions: control flow and addresses depend on *rows alone. */
typedef struct dhp_cpu_kernel {
  const char *instructions;
  /* Writes out and lse of these rows. */
  void (*attend)(const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch);
  /* The same of at most DHP_CPU_FEW_ROWS rows in two steps: their chains over one segment; the fold of all
   * segments that they see, in their order. */
  void (*attend_segment)(const dhp_cpu_rows *rows, int64_t segment, dhp_cpu_partial *partial, dhp_cpu_scratch *scratch);
  void (*fold_segments)(const dhp_cpu_rows *rows, const dhp_cpu_partial *partials, dhp_cpu_scratch *scratch);
  /* Writes lse and delta of these rows of queries, for the two functions that follow. */
  void (*sum_rows)(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch);
  /* Writes dq of these rows of queries. */
  void (*query_gradient)(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch);
  /* Writes dk and dv, where wanted, of these rows of keys, over all heads that read them. */
  void (*key_gradients)(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch);
  /* What these rows of queries add to the gradient of their head's sink; needs no mask, and no rows but args'. */
  double (*sink_gradient)(const dhp_cpu_gradient_rows *rows, dhp_cpu_scratch *scratch);
} dhp_cpu_kernel;

#if defined(__x86_64__)
extern const dhp_cpu_kernel dhp_cpu_avx512, dhp_cpu_avx2;
#endif
extern const dhp_cpu_kernel dhp_cpu_baseline;

/* ---- running (work.c) ------------------------------------------------------------------------------------------- */

/* Units [0, count) of one kind, in any order and partition. */
typedef struct dhp_cpu_work {
  void (*unit)(const void *context, int64_t index, dhp_cpu_scratch *scratch);
  const void *context;
  int64_t count;
} dhp_cpu_work;

/* How much of the scratch memory a call can have written: tells what has to be wiped. */
typedef struct dhp_cpu_extent {
  int64_t queries, keys, head_dim; /* the larger one of q's and v's */
  int is_backward, is_folded;
} dhp_cpu_extent;

static inline int64_t dhp_cpu_most_dims(const dhp_attention *args) {
  return args->q.size[3] > args->v.size[3] ? args->q.size[3] : args->v.size[3];
}

/* Of a forward in which no sequence has more queries and keys. */
static inline dhp_cpu_extent dhp_cpu_forward_extent(const dhp_attention *args, int64_t queries, int64_t keys) {
  return (dhp_cpu_extent){.queries = queries,
                          .keys = keys,
                          .head_dim = dhp_cpu_most_dims(args),
                          .is_folded = args->sinks || keys > DHP_SEGMENT_KEYS};
}

/*
 * Memory of at least so many bytes in whole cache lines, no fewer than one; *size: all of it, for dhp_ct_wipe. NULL:
 * there is none left. Freed with free.
 */
void *dhp_cpu_lines_new(size_t bytes, size_t *size);

/*
 * Runs n kinds of work one after another, each over the executor (NULL: in the calling thread), in the floating-point
 * state of float_mode.h. Fails with DHP_OUT_OF_MEMORY alone, before the first unit.
 */
dhp_status dhp_cpu_run(const dhp_cpu_work *work, int n, const dhp_cpu_extent *extent, const dhp_executor *executor,
                       dhp_error *error);

/*
 * Which tile of a head is the one in place `step` of an order that evens a partition out: first, last, second, last but
 * one, ... Under a causal mask tiles cost more the later they are (of queries), or the earlier (of keys).
 */
static inline int64_t dhp_cpu_tile_at(int64_t step, int64_t tiles) {
  return step % 2 ? tiles - 1 - step / 2 : step / 2;
}

/* Of calls whose units follow one another: which has this unit. first_unit: of each; then the number of all. */
int64_t dhp_cpu_call_at(const int64_t *first_unit, int64_t calls, int64_t unit);

/* The kernels this CPU can run, best first, and how many (1 to 3); dhp_cpu_forward uses the first. */
int dhp_cpu_kernels(dhp_cpu_kernel kernels[3]);

/* The units of a forward, and one of them. */
int64_t dhp_cpu_units(const dhp_attention *args);
dhp_cpu_rows dhp_cpu_unit(const dhp_attention *args, const dhp_mask *mask, const dhp_cpu_places *places, int64_t index);

/* The segments that the unit's rows see: at least one. */
static inline dhp_segments dhp_cpu_segments(const dhp_cpu_rows *rows) {
  const int64_t last_row = rows->first + (rows->count - 1) / rows->heads;
  return dhp_segments_of(
      (dhp_key_range){dhp_mask_row(rows->mask, rows->first).first, dhp_mask_row(rows->mask, last_row).last});
}

/* dhp_cpu_forward with a chosen kernel, and any mask of the call's lengths in place of the one that args ask for. */
dhp_status dhp_cpu_forward_with(const dhp_cpu_kernel *kernel, const dhp_attention *args, const dhp_mask *mask,
                                const dhp_executor *executor, dhp_error *error);
/* The same of dhp_cpu_varlen, whose masks follow from the lengths. */
dhp_status dhp_cpu_varlen_with(const dhp_cpu_kernel *kernel, const dhp_varlen *args, const dhp_executor *executor,
                               dhp_error *error);
/* The same of dhp_cpu_backward. */
dhp_status dhp_cpu_backward_with(const dhp_cpu_kernel *kernel, const dhp_backward *args, const dhp_mask *mask,
                                 const dhp_executor *executor, dhp_error *error);
/* The same of dhp_cpu_varlen_backward. */
dhp_status dhp_cpu_varlen_backward_with(const dhp_cpu_kernel *kernel, const dhp_varlen_backward *args,
                                        const dhp_executor *executor, dhp_error *error);
/* The same of dhp_cpu_sinks_backward; float64 has no kernels. */
dhp_status dhp_cpu_sinks_backward_with(const dhp_cpu_kernel *kernel, const dhp_sinks_backward *args,
                                       const dhp_executor *executor, dhp_error *error);

#endif
