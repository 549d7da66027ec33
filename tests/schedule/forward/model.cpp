/*
 * model.cpp - what a forward CTA has to multiply and to store.
 *
 * Checked: every product reads the q, k or v tile that comes next in its key loop; each query tile is stored where it
 * belongs, after all its products; every key tile is visited. A warp that gave up stores NaN only.
 */
#include "model.h"

#include <math.h>

#include <array>

using namespace forward;

namespace {

enum {
  SCORES_PRODUCT,
  OUTPUT_PRODUCT,
  LANE_ROWS = 32, /* of a warpgroup of which a lane has one */
  KEYS_PER_STEP = 16,
  STEP_COLUMNS = 16 /* of one step of S */
};

/* One step of a key loop. */
struct Visit {
  const QueryTile *of;
  int tile;
  bool is_first;
};

/* How far a warp is: key tiles multiplied, q k^T and P v, and rows of lse stored. */
struct Progress {
  int scored, output, stored;
};

std::vector<QueryTile> tiles;
std::vector<Visit> visits;
std::array<Progress, sim::MAX_WARPS> progress;
sim::Rows stored_rows;

Progress &mine() { return progress[(size_t)sim::warp_index()]; }

int box_count() { return shape.head_dim / shape.box_columns; }

/* How many rows of a query tile a lane stores. */
int stores() { return shape.rows / LANE_ROWS; }

int group_of(int warp) { return warp / sim::WARPS_PER_GROUP; }

bool products_have_ended() {
  return sim::products_have_ended(SCORES_PRODUCT) && sim::products_have_ended(OUTPUT_PRODUCT);
}

} // namespace

QueryTile forward::tile_at(int nth) {
  if (nth < (int)tiles.size()) return tiles[(size_t)nth];
  return {0, 0, 0, 0, 0, 0};
}

/* Query tiles that differ in all they can, so that no tile of one passes for another's. */
sim::Layout model::begin(const std::vector<int> &lengths) {
  tiles.clear();
  for (int i = 0; i < (int)lengths.size(); i++) {
    const int n = lengths[(size_t)i];
    tiles.push_back({i, 7 + i, 3 + 2 * i, 512 * i, n, sim::random(n + 1)});
  }
  visits.clear();
  for (const QueryTile &tile : tiles)
    for (int i = 0; i < tile.key_tiles; i++)
      visits.push_back({&tile, tile.key_tiles - 1 - i, i == 0});
  progress.fill({0, 0, 0});
  stored_rows = {0, 0};
  sim::Layout layout;
  layout.warps = shape.warpgroups * sim::WARPS_PER_GROUP;
  layout.barriers = shape.barriers;
  layout.mbarriers = shape.warpgroups + shape.stages;
  layout.boxes = {{shape.q, shape.warpgroups * box_count(), shape.q_box_bytes},
                  {shape.k, shape.stages * box_count(), shape.kv_box_bytes},
                  {shape.v, shape.stages * box_count(), shape.kv_box_bytes}};
  return layout;
}

/* The first mbarriers are of one warpgroup's q each, the others of pairs, which all warps wait for. */
bool model::waits_for(int warp, int mbarrier) { return mbarrier >= shape.warpgroups || group_of(warp) == mbarrier; }

/* The first q is waited for at the start and in the first query tile. */
bool model::waits_twice(int mbarrier) { return mbarrier < shape.warpgroups; }

void model::commit(int product, int steps) {
  const bool scores = product == SCORES_PRODUCT;
  sim::require(steps == (scores ? shape.head_dim / STEP_COLUMNS : shape.tile_k / KEYS_PER_STEP),
               "a product of too few or too many steps");
  (scores ? mine().scored : mine().output)++;
}

void model::end_warp() {
  sim::require(mine().scored == (int)visits.size() && mine().output == (int)visits.size(), "key tiles are left");
  sim::require(mine().stored == stores() * (int)tiles.size(), "rows are left");
}

sim::Rows model::rows() { return stored_rows; }

namespace {

const Visit &next_to_score() {
  sim::require(mine().scored < (int)visits.size(), "q k^T of more key tiles than there are");
  return visits[(size_t)mine().scored];
}

/* That part of this warpgroup's q. */
sim::Tile queries(const QueryTile &of, int column) {
  return {QUERIES, column, of.row + group_of(sim::warp_index()) * shape.rows, of.head, of.batch};
}

/* From the start of a box. */
uint32_t bytes_of_columns(int columns) { return (uint32_t)(columns * shape.row_bytes / shape.box_columns); }

/* Returns the column with which this step of S begins. */
int begin_step_of_scores(uint32_t k_descriptor, int accumulate) {
  const int step = sim::step_of(SCORES_PRODUCT);
  const Visit &visit = next_to_score();
  const int column = step * STEP_COLUMNS, in_box = column % shape.box_columns;
  sim::require((accumulate != 0) == (step > 0), "S begins with the sums before it, or loses its own");
  sim::read(sim::address_of(k_descriptor) - bytes_of_columns(in_box),
            {KEYS, column - in_box, visit.tile * shape.tile_k, visit.of->key_head, visit.of->batch});
  return column;
}

} // namespace

void forward::multiply_scores(uint32_t q_descriptor, uint32_t k_descriptor, int accumulate) {
  const int column = begin_step_of_scores(k_descriptor, accumulate), in_box = column % shape.box_columns;
  sim::read(sim::address_of(q_descriptor) - bytes_of_columns(in_box), queries(*next_to_score().of, column - in_box));
}

/* What it puts into the registers says of which query tile, and from which column on; lane 0 asks. */
void model::load_matrices(uint32_t *four_words, uint32_t from) {
  const QueryTile &of = *next_to_score().of;
  const uint32_t of_group = (uint32_t)box_count() * shape.q_box_bytes, offset = from - shape.q;
  sim::require((int)(offset / of_group) == group_of(sim::warp_index()), "another warpgroup's q");
  const uint32_t box = offset % of_group / shape.q_box_bytes, in_box = offset % shape.q_box_bytes;
  const uint32_t row = in_box / (uint32_t)shape.row_bytes, rows = (uint32_t)(shape.rows / sim::WARPS_PER_GROUP);
  sim::require(row == rows * (uint32_t)(sim::warp_index() % sim::WARPS_PER_GROUP), "another warp's rows of q");
  const int first = (int)box * shape.box_columns;
  sim::read_at_once(from - in_box, queries(of, first));
  const uint32_t step_bytes = bytes_of_columns(STEP_COLUMNS), in_row = in_box % (uint32_t)shape.row_bytes;
  sim::require(in_row % step_bytes == 0, "q from the middle of a step on");
  four_words[0] = (uint32_t)(&of - tiles.data());
  four_words[1] = (uint32_t)first + in_row / step_bytes * STEP_COLUMNS;
}

void forward::multiply_held(const uint32_t *q, uint32_t k_descriptor, int accumulate) {
  const int column = begin_step_of_scores(k_descriptor, accumulate);
  sim::require(sim::has_timed_out() || &tiles[q[0]] == next_to_score().of, "another query tile's q");
  sim::require((int)q[1] == column, "other columns of q");
}

void forward::multiply_output(uint32_t v_descriptor, int accumulate) {
  const int step = sim::step_of(OUTPUT_PRODUCT);
  sim::require(mine().output < mine().scored, "P v of a key tile that has no scores yet");
  const Visit &visit = visits[(size_t)mine().output];
  sim::require((accumulate != 0) == (step > 0 || !visit.is_first), "O begins with another tile's, or loses its own");
  const uint32_t step_bytes = (uint32_t)(step * KEYS_PER_STEP * shape.row_bytes);
  for (int i = 0; i < box_count(); i++)
    sim::read(sim::address_of(v_descriptor) - step_bytes + (uint32_t)i * sim::leading_bytes_of(v_descriptor),
              {VALUES, i * shape.box_columns, visit.tile * shape.tile_k, visit.of->key_head, visit.of->batch});
}

void model::store_row(const void *, const uint32_t *four_words) {
  sim::require(sim::launches_have_ended(), "a store before the launches before have ended");
  sim::require(products_have_ended(), "a store before its product has ended");
  const uint32_t all_nan = sim::NAN_ELEMENT << 16 | sim::NAN_ELEMENT;
  for (int i = 0; i < 4; i++)
    sim::require(four_words[i] == (sim::has_timed_out() ? all_nan : 0),
                 "out is NaN without a time-out, or a number after one");
}

void model::store_number(const float *to, float x) {
  Progress &now = mine();
  sim::require(sim::launches_have_ended() && products_have_ended(), "lse is stored too early");
  const size_t nth = (size_t)(now.stored / stores());
  sim::require(nth < tiles.size(), "lse of more query tiles than there are");
  const QueryTile &of = tiles[nth];
  int visited = 0;
  for (size_t i = 0; i <= nth; i++)
    visited += tiles[i].key_tiles;
  sim::require(now.scored == visited && now.output == visited, "lse is stored before the end of its key loop");
  const int64_t row = of.row + sim::warp_index() * shape.rows / sim::WARPS_PER_GROUP + now.stored % stores() * 8;
  sim::require(to - LSE == ((int64_t)of.batch * HEADS + of.head) * SEQLEN_Q + row, "lse of another row"); /* lane 0's */
  sim::require(isnan(x) == sim::has_timed_out(), "lse is NaN without a time-out, or a number after one");
  now.stored++;
  stored_rows.stored++;
  stored_rows.poisoned += sim::has_timed_out();
}
