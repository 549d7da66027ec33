/*
 * params.h - what the host and a backward kernel agree on: the launch parameters and the shared memory plan.
 *
 * A CTA *owns* rows of one side of the scores, keys (for dk, dv) or queries (for dq), and *walks* tiles of the other.
 */
#ifndef DHP_BACKWARD_PARAMS_H
#define DHP_BACKWARD_PARAMS_H

#include <stdint.h>

#include "../../hopper/divisor.h"

enum {
  DHP_BWD_ALIGN = 1024 /* the 128-byte swizzle repeats every 1024 bytes; CUDA aligns shared memory to 16 */
};

/* All public: shape, strides, flags, and where the results go. q, k, v and grad_out travel as tensor maps. */
typedef struct dhp_bwd_params {
  void *from_ds, *from_p;                      /* dk or dq; dv. Like k, q, v; 16-byte aligned rows; null: unwanted */
  int64_t from_ds_stride[3], from_p_stride[3]; /* of batch, head and row, in elements */
  const float *statistics;                     /* [batch heads][pairs][4], see ../delta/params.h */
  /* With dq among others, one_pass.cu: */
  uint8_t *units;                               /* [batch heads][seqlen_q], see ../delta/params.h */
  int32_t *sums;                                /* [batch heads][head_dim / 64][blocks][1024], ../dq_out/params.h */
  float *failed;                                /* [batch key heads]: gets NaN if a share of dq is wrong */
  uint32_t *spent;                              /* [batch key heads][own_tiles][128][2], which nobody reads any more */
  int32_t blocks;                               /* of sixteen query rows, in a head */
  int32_t pairs;                                /* of query rows, in a head */
  int32_t heads, own_heads, heads_per_key_head; /* heads: of queries; own_heads: of the owned side */
  int32_t seqlen_q, seqlen_k;                   /* seqlen_k: without the keys that no query sees */
  int32_t own_rows, own_tiles;                  /* of one head: rows of the owned side, CTAs */
  int32_t ordered_heads, listed_heads;          /* of all owned heads: the first ones, and the others; see walk.cuh */
  dhp_divisor by_own_tiles, by_listed_heads, by_own_heads, by_heads_per_key_head;
  int32_t head_dim;
  int32_t is_causal, causal_offset; /* offset clamped to [-seqlen_q, seqlen_k] */
  float scale, scale_log2;          /* scale_log2: times log2(e) */
  uint32_t zero;                    /* 0, which the compiler must not know: see DEFINE_WAIT in ptx.cuh */
} dhp_bwd_params;

/*
 * Dynamic shared memory of one CTA in bytes: the owned rows of the tensor of S and, with dS, of that of dP; stages of a
 * tile of S and two floats for each of its rows; tiles of dP, a stage each or one for all; an 8-byte mbarrier for each
 * stage and for that one. With dq among others, two tiles of dS, and 64 times 64 integers for each warpgroup. A macro
 * because it initialises a constant table.
 */
#define DHP_BWD_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages, owns_keys, with_ds, with_p, with_dq, \
                             dp_stages)                                                                       \
  (DHP_BWD_ALIGN + (1 + (with_ds)) * (warpgroups) * (rows) * (head_dim) * 2 +                                 \
   ((stages) + (dp_stages)) * (tile_k) * (head_dim) * 2 + (stages) * (tile_k) * 8 +                           \
   8 * ((stages) + ((dp_stages) < (stages))) + (with_dq) * (warpgroups) * (2 * (rows) * (tile_k) * 2 + 64 * 64 * 4))

#endif
