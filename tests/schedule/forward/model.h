/* model.h - what the forward's compiled kernel and its model know of each other. */
#ifndef SCHEDULE_FORWARD_MODEL_H
#define SCHEDULE_FORWARD_MODEL_H

#include "../simulator.h"

namespace forward {

enum Tensor { QUERIES, KEYS, VALUES };

enum { MAX_GROUPS = 3 }; /* warpgroups of a CTA */

/* One query tile of the CTA, and which key tiles it sees. */
struct QueryTile {
  int batch, head, key_head, row;
  int first_tile, key_tiles;   /* first_tile: where there may be a window; else 0 */
  int masked;                  /* steps, counted over all segments */
  int key_row, plain_end;      /* key_row: of a tile in a list; else 0. plain_end: where there may be a window */
  int unseen[MAX_GROUPS] = {}; /* of its last key tiles those that a warpgroup's own rows do not see */
  int left[MAX_GROUPS] = {};   /* and of its first ones, where a warpgroup leaves early */
};
const QueryTile &tile_at(int nth);   /* after the last: the last */
const QueryTile &tile_with(int row); /* the one whose row this is */
int tile_count();

/* The constants of one kernel. rows: query rows of a warpgroup. */
struct Shape {
  int head_dim, tile_k, warpgroups, rows, stages;
  int box_columns, row_bytes;
  uint32_t q_box_bytes, kv_box_bytes;
  int q_places;               /* one after another, each of all warpgroups */
  uint32_t q, k, v, barriers; /* shared addresses */
  bool own_tiles;             /* a warpgroup begins with the last key tile that its own rows see */
  bool leaves_early;          /* and ends with the first one */
  bool listed;                /* tiles stand in a list: of one batch and head, with places among the keys */
  bool windowed;              /* without a list: the first key tiles are not seen */
  int segment_tiles;
  int splits;       /* key segments that are items of their own; 1: none */
  int part_columns; /* that a quad stores of a part at a time */
  int not_seen;     /* key tiles from a segment that a query tile does not see to what it visits instead */
};
extern const Shape shape;

enum { ROWS_APART = 512 };                                   /* from one query tile to the next */
enum { HEADS = 64, SEQLEN_Q = 1 << 12, SEQLEN_K = 1 << 20 }; /* of the tensors that the simulated CTA works on */
/* Addresses only: what is stored there the model keeps. */
float *const LSE = reinterpret_cast<float *>(4096);
void *const OUT = reinterpret_cast<void *>(1 << 20);
float *const SUMS_OF_PARTS = reinterpret_cast<float *>(INT64_C(1) << 40);
float *const OUT_OF_PARTS = reinterpret_cast<float *>(INT64_C(1) << 41);
const float HIGHEST_SCORE = 1e30f;

void multiply_scores(uint32_t q_descriptor, uint32_t k_descriptor, int accumulate);
void multiply_held(const uint32_t *q, uint32_t k_descriptor, int accumulate); /* q: of load_matrices */
void multiply_output(uint32_t v_descriptor, int accumulate);
/* What the product that was named last gives. */
void set_scores(float *s);
void set_output(float *o, const uint32_t *probabilities, int accumulate);

} // namespace forward

#endif
