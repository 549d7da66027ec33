/*
 * secrecy.h - the cases on which ctgrind.c and steptrace.c look for what depends on secrets.
 *
 * Code that no case executes is not looked at. So the traced cases between them take every line of the tile kernel, and
 * both ways of every branch, on every instruction set; secrecy_coverage.c is how the tests know. Every case is one of
 * the gradients too, that of sinks included.
 */
#ifndef DHP_TEST_SECRECY_H
#define DHP_TEST_SECRECY_H

#include <string.h>

#include "check.h"
#include "gradients/gradients.h"

enum { DQ = 1, DK = 2, DV = 4, GRAD_LSE = 8, ALL = DQ | DK | DV | GRAD_LSE };
enum { SOFTCAP = 1, SINKS = 2 };

typedef struct secrecy_case {
  const char *what;
  shape s;                 /* without a mask */
  int64_t lowest, highest; /* the mask, as in csrc/mask.h */
  int wants_lse;
  int wanted;    /* gradients: DQ, DK, DV; GRAD_LSE: that of lse is given */
  int page_size; /* of a forward whose keys lie in pages; 0: one behind the other */
  int traced;    /* in so many dtypes steptrace.c executes it, from float32 on: a step takes microseconds */
  int forms;     /* SOFTCAP, SINKS */
} secrecy_case;

/* Those of the last problem, in its lse's dtype, and the gradient of the first tiles' rows: as secret as q, k and v. */
enum { MOST_HEADS = 4 };
static double secrecy_sinks[MOST_HEADS], secrecy_dsinks[MOST_HEADS];

static inline void set_sink(dhp_dtype dtype, int64_t head, double value) {
  const float narrow = (float)value;
  if (dtype == DHP_FLOAT64)
    secrecy_sinks[head] = value;
  else
    memcpy((char *)secrecy_sinks + head * (int64_t)sizeof narrow, &narrow, sizeof narrow);
}

static const secrecy_case secrecy_cases[] = {
    {"all keys, rows that end inside a vector", {1, 1, 1, 7, 7, 65, 0, 0}, INT64_MIN, INT64_MAX, 1, ALL, 0, 3, 0},
    {"causal, a block of queries, early rows without keys",
     {1, 1, 1, 65, 8, 16, 0, 0},
     INT64_MIN,
     -3,
     1,
     DQ | DK | DV,
     0,
     1,
     0},
    {"a window narrower than a block of rows, late rows without keys",
     {1, 1, 1, 9, 100, 16, 0, 0},
     93,
     97,
     1,
     DQ | DV,
     0,
     1,
     0},
    {"a window wider than a block of rows, early rows without keys",
     {1, 1, 1, 16, 12, 16, 0, 0},
     -10,
     -2,
     1,
     ALL,
     0,
     3,
     0},
    {"key tiles before the window, no lse", {1, 1, 1, 2, 300, 16, 0, 0}, 200, 203, 0, DQ, 0, 1, 0},
    {"few rows, of four heads", {1, 4, 1, 1, 37, 97, 0, 0}, INT64_MIN, INT64_MAX, 1, 0, 0, 3, 0},
    {"a row alone", {1, 1, 1, 1, 20, 129, 0, 0}, INT64_MIN, INT64_MAX, 1, 0, 0, 3, 0},
    {"few rows, causal, the first without keys", {1, 1, 1, 4, 100, 33, 0, 0}, INT64_MIN, -1, 1, 0, 0, 3, 0},
    {"few rows, a window that moves with them", {1, 1, 1, 4, 40, 64, 0, 0}, 2, 30, 0, 0, 0, 3, 0},
    {"few rows, a window that all begin in", {1, 2, 1, 2, 40, 64, 0, 0}, -2, 38, 0, 0, 0, 1, 0},
    {"no keys", {1, 1, 1, 2, 0, 16, 0, 0}, INT64_MIN, INT64_MAX, 1, ALL, 0, 1, 0},
    {"two query tiles, grouped heads", {1, 2, 1, 100, 4, 16, 0, 0}, INT64_MIN, INT64_MAX, 1, DK | GRAD_LSE, 0, 1, 0},
    {"few rows, pages that end inside a key tile", {1, 2, 1, 2, 128, 16, 0, 0}, INT64_MIN, 100, 1, 0, 64, 1, 0},
    {"pages that end inside a key tile", {1, 2, 1, 5, 128, 16, 0, 0}, INT64_MIN, 100, 1, DQ, 64, 1, 0},
    {"soft cap and sinks, rows without keys", {1, 2, 1, 9, 20, 16, 0, 0}, INT64_MIN, -2, 1, ALL, 0, 1, SOFTCAP | SINKS},
    {"few rows, soft cap and sinks", {1, 4, 1, 1, 37, 64, 0, 0}, INT64_MIN, INT64_MAX, 1, 0, 0, 1, SOFTCAP | SINKS},
    {"a window that moves from a segment to the next", {1, 1, 1, 9, 4200, 16, 0, 0}, 4090, 4093, 1, 0, 0, 1, 0},
    {"few rows, a window that moves from a segment to the next",
     {1, 1, 1, 4, 4200, 16, 0, 0},
     4092,
     4094,
     1,
     0,
     0,
     1,
     0},
    {"few rows over three segments", {1, 2, 1, 2, 8200, 16, 0, 0}, INT64_MIN, INT64_MAX, 1, 0, 0, 0, 0},
    {"decoding, grouped heads", {1, 4, 2, 1, 130, 64, 0, 0}, INT64_MIN, INT64_MAX, 1, ALL, 0, 0, 0},
    {"causal, two key tiles", {1, 1, 1, 5, 101, 32, 0, 0}, INT64_MIN, 96, 1, ALL, 0, 0, 0},
    {"causal, grouped heads, two batches", {2, 4, 2, 37, 101, 20, 0, 0}, INT64_MIN, 64, 1, ALL, 0, 0, 0},
    {"two query tiles, rows without keys", {1, 1, 1, 131, 99, 67, 0, 0}, INT64_MIN, -5, 1, ALL, 0, 0, 0},
    {"a window over two query tiles and three key tiles", {1, 2, 1, 131, 300, 129, 0, 0}, 30, 160, 1, ALL, 0, 0, 0},
};
enum {
  SECRECY_CASES = sizeof secrecy_cases / sizeof *secrecy_cases,
  MOST_QUERIES = 256, /* of all heads of a traced case */
  MOST_SEGMENTS = 2,  /* that few rows of a traced case see */
  MOST_PAGES = 2
};

static inline void set_sinks(const secrecy_case *c, dhp_dtype dtype) {
  for (int64_t h = 0; h < c->s.heads; h++)
    set_sink(dtype, h, random_normal());
}

static inline problem secrecy_problem(const secrecy_case *c, dhp_dtype dtype, memory_layout layout) {
  problem p = problem_new(c->s, dtype, layout);
  p.mask = dhp_mask_band(c->s.queries, c->s.keys, c->lowest, c->highest);
  if (!c->wants_lse) p.args.lse = NULL;
  if (c->forms & SOFTCAP) p.args.softcap = 2.;
  if (c->forms & SINKS) p.args.sinks = secrecy_sinks;
  set_sinks(c, dtype);
  return p;
}

static inline gradient_problem secrecy_gradients(const secrecy_case *c, dhp_dtype dtype, memory_layout layout) {
  gradient_problem p = gradients_new_band(c->s, c->lowest, c->highest, dtype, layout);
  for (int i = 0; i < 3; i++)
    if (!(c->wanted >> i & 1)) gradient(&p, i)->data = NULL;
  if (!(c->wanted & GRAD_LSE)) p.args.grad_lse = NULL;
  if (c->forms & SOFTCAP) p.args.forward.softcap = 2.;
  p.args.forward.sinks = secrecy_sinks; /* for the gradient of sinks alone */
  set_sinks(c, dtype);
  return p;
}

/* The same with its keys and values in pages, the last page first, if the case has pages. One batch. */
static inline problem secrecy_in_pages(const secrecy_case *c, const problem *p, int32_t pages[MOST_PAGES]) {
  problem paged = *p;
  if (c->page_size == 0) return paged;
  const int64_t count = c->s.keys / c->page_size;
  dhp_tensor *const tensors[] = {&paged.args.k, &paged.args.v};
  for (int i = 0; i < 2; i++) {
    tensors[i]->size[0] = count;
    tensors[i]->size[2] = c->page_size;
    tensors[i]->stride[0] = c->page_size * tensors[i]->stride[2];
  }
  for (int64_t i = 0; i < count; i++)
    pages[i] = (int32_t)(count - 1 - i);
  paged.places.pages = pages;
  return paged;
}

/* The first unit of work: a tile of rows of the first head, or few rows of the first heads. */
static inline dhp_cpu_rows secrecy_rows(const problem *p) { return dhp_cpu_unit(&p->args, &p->mask, &p->places, 0); }

/* Of a forward: at once; few rows also by segments. */
static inline void secrecy_attend(const dhp_cpu_kernel *kernel, const dhp_cpu_rows *rows, dhp_cpu_scratch *scratch) {
  static dhp_cpu_partial partials[MOST_SEGMENTS];
  kernel->attend(rows, scratch);
  if (rows->count > DHP_CPU_FEW_ROWS) return;
  const dhp_segments segments = dhp_cpu_segments(rows);
  for (int64_t i = 0; i < segments.last - segments.first; i++)
    kernel->attend_segment(rows, segments.first + i, &partials[i], scratch);
  kernel->fold_segments(rows, partials, scratch);
}

/* All functions of a backward, on the first tile of each head; lse and delta: memory for their queries. */
static inline void secrecy_differentiate(const dhp_cpu_kernel *kernel, const gradient_problem *p, float *lse,
                                         float *delta, dhp_cpu_scratch *scratch) {
  const int64_t queries = p->args.forward.q.size[2], keys = p->args.forward.k.size[2];
  const dhp_mask by_key = dhp_mask_transposed(&p->forward.mask);
  dhp_cpu_gradient_rows rows = {
      .args = &p->args, .mask = &p->forward.mask, .lse = lse, .delta = delta, .lse_pitch = queries};
  for (int head = 0; head < (int)p->args.forward.q.size[1]; head++) {
    rows.head = head;
    rows.count = queries < DHP_CPU_TILE_Q ? (int)queries : DHP_CPU_TILE_Q;
    kernel->sum_rows(&rows, scratch);
    if (p->args.dq.data) kernel->query_gradient(&rows, scratch);
    secrecy_dsinks[head] = kernel->sink_gradient(&rows, scratch);
  }
  rows.head = 0;
  rows.mask = &by_key;
  rows.count = keys < DHP_CPU_TILE_Q ? (int)keys : DHP_CPU_TILE_Q;
  if (rows.count > 0 && (p->args.dk.data || p->args.dv.data)) kernel->key_gradients(&rows, scratch);
}

#endif
