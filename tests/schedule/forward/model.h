/* model.h - what the forward's compiled kernel and its model know of each other. */
#ifndef SCHEDULE_FORWARD_MODEL_H
#define SCHEDULE_FORWARD_MODEL_H

#include "../simulator.h"

namespace forward {

enum Tensor { QUERIES, KEYS, VALUES };

/* One query tile of the CTA, and how many key tiles it sees. */
struct QueryTile {
  int batch, head, key_head, row, key_tiles, masked;
  int key_row, plain_end; /* of a tile in a list; else 0 */
};
QueryTile tile_at(int nth); /* no key tiles after the last */
int tile_count();

/* The constants of one kernel. rows: query rows of a warpgroup. */
struct Shape {
  int head_dim, tile_k, warpgroups, rows, stages;
  int box_columns, row_bytes;
  uint32_t q_box_bytes, kv_box_bytes;
  uint32_t q, k, v, barriers; /* shared addresses */
  bool listed;                /* tiles stand in a list: of one batch and head, with places among the keys */
};
extern const Shape shape;

enum { HEADS = 64, SEQLEN_Q = 1 << 12, SEQLEN_K = 1 << 20 }; /* of the tensors that the simulated CTA works on */
float *const LSE = reinterpret_cast<float *>(4096);          /* addresses only: nothing is stored */
void *const OUT = reinterpret_cast<void *>(1 << 20);

void multiply_scores(uint32_t q_descriptor, uint32_t k_descriptor, int accumulate);
void multiply_held(const uint32_t *q, uint32_t k_descriptor, int accumulate); /* q: of load_matrices */
void multiply_output(uint32_t v_descriptor, int accumulate);
/* What the product that was named last gives. */
void set_scores(float *s);
void set_output(float *o, const uint32_t *probabilities, int accumulate);

} // namespace forward

#endif
