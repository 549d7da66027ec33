/*
 * params.h - what the host and the forward kernel agree on: the launch parameters and the shared memory plan.
 *
 * Read by the family's host code and by its kernel; one kernel is one choice of the constants in family.py.
 */
#ifndef DHP_FORWARD_PARAMS_H
#define DHP_FORWARD_PARAMS_H

#include <stdint.h>

#include "../../hopper/divisor.h"
#include "../../hopper/softmax_params.h"
#include "../tiles/params.h"

enum {
  DHP_SHARED_ALIGN = 1024 /* the 128-byte swizzle repeats every 1024 bytes; CUDA aligns shared memory to 16 */
};

/*
 * All public: shape, strides, flags, and where the results go. q, k and v travel as tensor maps.
 *
 * The rows of a warpgroup are 2^log2_rows query rows of each of as many heads as that leaves, a head group, which share
 * a key head; the head varies slowest.
 */
typedef struct dhp_fwd_params {
  void *out;             /* [batch, heads, seqlen_q, head_dim], 16-byte aligned rows */
  int64_t out_stride[3]; /* of batch, head and row, in elements */
  float *lse;            /* [batch, heads, seqlen_q] or null */
  /*
   * Parts of rows, each over a key segment or several: O as float32, and its shift and sum, as ../fold/params.h has
   * them. If splits > 1, each segment of a query tile is an item of its own, and has its parts there, [item, rows of a
   * tile], for the fold family. Else a CTA keeps there what its rows are so far, [CTA, rows of a tile]; null if all
   * keys are of one segment.
   */
  float *part_out, *part_sums;
  int32_t batch, heads, heads_per_key_head;
  int32_t seqlen_q, seqlen_k, head_dim;
  int32_t highest;                /* query i sees keys up to i + highest, which is in [-seqlen_q, keys] */
  int32_t log2_rows, head_groups; /* head_groups: of one batch, splits times each */
  int32_t q_tiles;                /* of one head group */
  /* The static schedule: made by schedule.c, read by query_tiles.cuh. Items: at most INT32_MAX - 2 grid, in order and
   * listed. */
  int32_t items, ordered_items;
  int32_t ordered_rounds, ordered_rest; /* ordered_items / grid, and its remainder */
  int32_t mirrored, listed_groups;      /* mirrored: 1 if an item in order is two tiles */
  dhp_divisor by_q_tiles, by_listed_groups, by_head_groups, by_heads_per_key_head;
  DHP_SOFTMAX_PARAMS
  uint32_t zero;  /* 0, which the compiler must not know: see DEFINE_WAIT in ptx.cuh */
  int32_t splits; /* key segments that are items of their own; 1: none */
  dhp_divisor by_splits;
} dhp_fwd_params;

/*
 * Beside them, of a kernel whose query tiles stand in a list in device memory (LISTED), made by the family tiles: one
 * batch, whose seqlen_q are the rows of all sequences; what a row sees is in the list. Items are its tiles, for each
 * head group. Head groups go in sections: first all tiles for those of one section.
 *
 * Keys come one behind the other, or in pages of 2^log2_page keys: then the batches of k and v are pages, and a key
 * tile comes in `pieces` of piece_keys, each from within a page.
 */
typedef struct dhp_fwd_list {
  const dhp_listed_tile *list;
  const int32_t *page_table;               /* without pages, or without an entry, any four bytes in device memory */
  int32_t pieces, piece_keys, piece_bytes; /* bytes: of one box */
  int32_t log2_page;
  int32_t with_pages;  /* 0 or 1 */
  int32_t row_in_page; /* bits of a key that count within its page */
  int32_t segment_of;  /* bits of a key tile that say its segment; 0: all that a row sees are one */
  int32_t section;     /* head groups of a section, of which there are whole ones */
  dhp_divisor by_section;
} dhp_fwd_list;

/* Beside them, of a kernel whose rows see no key before a window (WINDOWED). */
typedef struct dhp_fwd_window {
  int32_t lowest; /* query i sees keys from i + lowest on, which is in [-seqlen_q, keys] */
} dhp_fwd_window;

/* What a kernel of the family is for beside plain attention: its constant FORM, of kernels with a list. */
enum { DHP_FORM_PLAIN, DHP_FORM_SINKS, DHP_FORM_SOFTCAP /* with sinks or without */ };

/*
 * Beside them, of a kernel with a FORM. With a soft cap the scale of dhp_fwd_params is 1: what it scales are capped
 * scores.
 */
typedef struct dhp_fwd_forms {
  const float *sinks;   /* [heads] or null: the content is secret */
  int32_t has_sinks;    /* 0 or 1. A pointer compared with null would be kept in a predicate: there are too few */
  float scores_of_log2; /* 1 / scale_log2 */
  float cap, exponent_of_score; /* score to 2 log2(e) score scale / cap */
} dhp_fwd_forms;

/*
 * Dynamic shared memory of one CTA in bytes: places of a Q tile, tiles of K and of V, all of 2-byte elements, and an
 * 8-byte mbarrier for the q rows of each warpgroup and for each stage. A macro because it initialises a constant table.
 */
#define DHP_FWD_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages, listed, windowed, form, q_places)             \
  (DHP_SHARED_ALIGN + (q_places) * (warpgroups) * (rows) * (head_dim) * 2 + 2 * (stages) * (tile_k) * (head_dim) * 2 + \
   8 * ((warpgroups) + (stages)))

#endif
