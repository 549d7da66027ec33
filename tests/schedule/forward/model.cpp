/*
 * model.cpp - what a forward CTA has to multiply and to store.
 *
 * Checked: every product reads the q, k or v tile that comes next in its key loop, one segment of a query tile after
 * another; each query tile is stored where it belongs, after all its products; every key tile that a warpgroup's rows
 * see is visited. A warp that gave up stores NaN only. What a segment leaves for another: parts.cpp.
 *
 * Numbers: all scores of a row with a key tile are equal, and so are all elements of a tile of v. So out and lse say
 * which tiles went into them, and with which weights; they differ between query tiles.
 */
#include "run.h"

#include <math.h>

#include <algorithm>
#include <array>

using namespace forward;

namespace {

enum {
  LANE_ROWS = 32,     /* of a warpgroup of which a lane has one */
  PIECE_COLUMNS = 32, /* of a row, of which a lane stores one piece: 16 bytes */
  KEYS_PER_STEP = 16,
  STEP_COLUMNS = 16 /* of one step of S */
};

/* One step of a key loop. */
struct Visit {
  const Segment *in;
  int tile;
  bool is_first;
};

std::vector<QueryTile> tiles;
std::vector<const Segment *> outputs;              /* those that leave the output */
std::array<std::vector<Visit>, MAX_GROUPS> visits; /* of each warpgroup */
std::array<Progress, sim::MAX_WARPS> progress;
sim::Rows stored_rows;

int box_count() { return shape.head_dim / shape.box_columns; }

int pieces_of_row() { return shape.head_dim / PIECE_COLUMNS; }

/* Of all scores of a row, one of the two of a lane, with the nth key tile that is visited; of all elements of its v. */
double score_of(int visit, int row) { return (double)(visit * 5 % 7) - 3. * row; }
double value_of(int visit) { return 1. + (double)(visit * 3 % 11); }

int64_t row_of_out(const QueryTile &of, int r) {
  return ((int64_t)of.batch * HEADS + of.head) * SEQLEN_Q + row_of_lane(of.row, r);
}

int group_of(int warp) { return warp / sim::WARPS_PER_GROUP; }

const std::vector<Visit> &my_visits() { return visits[(size_t)my_group()]; }

} // namespace

std::vector<Segment> forward::segments;

int forward::my_group() { return group_of(sim::warp_index()); }

Progress &forward::mine() { return progress[(size_t)sim::warp_index()]; }

int forward::stores() { return shape.rows / LANE_ROWS; }

int64_t forward::row_of_lane(int64_t first, int r) {
  return first + sim::warp_index() * shape.rows / sim::WARPS_PER_GROUP + 8 * r;
}

const Segment &forward::segment_after(const std::vector<const Segment *> &of, int count, int each) {
  const size_t nth = (size_t)(count / each);
  sim::require(nth < of.size(), "more is stored, or read, than segments leave");
  return *of[nth];
}

/* kernel.cpp makes the scale 1. */
Expected forward::expect(const Segment &segment, int row) {
  if (!segment.is_seen) return {-HIGHEST_SCORE, 0., 0.};
  Expected all = {-INFINITY, 0., 0.};
  const int first = segment.first_of_rows[my_group()], end = segment.end[my_group()];
  for (int visit = first; visit < end; visit++)
    all.shift = fmax(all.shift, score_of(visit, row));
  for (int visit = first; visit < end; visit++) {
    const double weight = shape.tile_k * exp2(score_of(visit, row) - all.shift);
    all.sum += weight;
    all.out += weight * value_of(visit);
  }
  return all;
}

/* bfloat16 has eight bits; twice rounded. */
bool forward::is_close(double x, double expected) { return fabs(x - expected) <= 0.03 * (1. + fabs(expected)); }

const QueryTile &forward::tile_at(int nth) { return tiles[std::min((size_t)nth, tiles.size() - 1)]; }

const QueryTile &forward::tile_with(int row) { return tile_at(row / ROWS_APART); }

int forward::tile_count() { return (int)tiles.size(); }

namespace {

/* One after another, from the one of the last key on: the part of each goes into the next. */
void add_segments(const QueryTile &tile) {
  const int end = tile.first_tile + tile.key_tiles;
  for (int last = end - 1; last >= tile.first_tile;) {
    const int first = std::max(last - last % shape.segment_tiles, tile.first_tile);
    const bool resumes = last != end - 1, is_part = first != tile.first_tile;
    segments.push_back({&tile, last, last - first + 1, true, resumes, is_part, {}, {}});
    last = first - 1;
  }
}

/* Each an item, from the first one on; there are as many of every query tile. */
void add_split_segments(const QueryTile &tile) {
  for (int i = 0; i < shape.splits; i++) {
    const int begin = i * shape.segment_tiles, key_tiles = std::min(tile.key_tiles - begin, shape.segment_tiles);
    if (key_tiles > 0)
      segments.push_back({&tile, begin + key_tiles - 1, key_tiles, true, false, true, {}, {}});
    else
      segments.push_back({&tile, begin + shape.not_seen, 1, false, false, true, {}, {}});
  }
}

void list_segments() {
  segments.clear();
  for (const QueryTile &tile : tiles)
    shape.splits > 1 ? add_split_segments(tile) : add_segments(tile);
}

/* Those of a warpgroup. */
void list_visits(int group) {
  std::vector<Visit> &own = visits[(size_t)group];
  own.clear();
  int first_of_rows = 0;
  for (Segment &segment : segments) {
    if (!segment.resumes) first_of_rows = (int)own.size();
    const int unseen = segment.resumes ? 0 : segment.of->unseen[group];
    for (int i = unseen; i < segment.key_tiles - segment.of->left[group]; i++)
      own.push_back({&segment, segment.last - i, i == unseen});
    segment.first_of_rows[group] = first_of_rows;
    segment.end[group] = (int)own.size();
  }
}

void list_outputs() {
  outputs.clear();
  for (const Segment &segment : segments)
    if (!segment.is_part) outputs.push_back(&segment);
}

/* At least one key tile is seen by all; the last warpgroup's rows see most, here up to two more than the first one's.
 */
void hide_tiles(QueryTile *tile) {
  int unseen = 0;
  for (int group = shape.warpgroups - 1; shape.own_tiles && group-- > 0;)
    tile->unseen[group] = unseen = std::min(unseen + sim::random(2), tile->key_tiles - 1);
  int left = 0; /* the first warpgroup's rows see the first key tile */
  for (int group = 1; shape.leaves_early && group < shape.warpgroups; group++)
    tile->left[group] = left = std::min(left + sim::random(2), tile->key_tiles - 1 - tile->unseen[group]);
}

} // namespace

/* Query tiles that differ in all they can, so that no tile of one passes for another's. */
sim::Layout model::begin(const std::vector<int> &lengths) {
  tiles.clear();
  for (int i = 0; i < (int)lengths.size(); i++) {
    const int n = lengths[(size_t)i];
    const int masked = sim::random(n + 1);
    if (shape.listed)
      tiles.push_back({0, 0, 0, ROWS_APART * i, sim::random(shape.segment_tiles + 1), n, masked, 7 + 100000 * i,
                       sim::random(n + 1)});
    else if (shape.windowed) /* all within one segment */
      tiles.push_back({i, 7 + i, 3 + 2 * i, ROWS_APART * i, sim::random(9), n, masked, 0, sim::random(n + 1)});
    else
      tiles.push_back({i, 7 + i, 3 + 2 * i, ROWS_APART * i, 0, n, masked, 0, 0});
    hide_tiles(&tiles.back());
  }
  list_segments();
  list_outputs();
  for (int group = 0; group < shape.warpgroups; group++)
    list_visits(group);
  begin_parts();
  progress.fill({});
  stored_rows = {0, 0};
  sim::Layout layout;
  layout.warps = shape.warpgroups * sim::WARPS_PER_GROUP;
  layout.barriers = shape.barriers;
  layout.mbarriers = shape.warpgroups + shape.stages;
  layout.for_nothing = shape.warpgroups; /* q, where it has not been asked for */
  layout.boxes = {{shape.q, shape.q_places * shape.warpgroups * box_count(), shape.q_box_bytes},
                  {shape.k, shape.stages * box_count(), shape.kv_box_bytes},
                  {shape.v, shape.stages * box_count(), shape.kv_box_bytes}};
  return layout;
}

/* The first mbarriers are of one warpgroup's q each, the others of pairs, which all warps wait for. */
bool model::waits_for(int warp, int mbarrier) { return mbarrier >= shape.warpgroups || group_of(warp) == mbarrier; }

bool model::waits_twice(int) { return false; }

void model::commit(int product, int steps) {
  const bool scores = product == SCORES_PRODUCT;
  sim::require(steps == (scores ? shape.head_dim / STEP_COLUMNS : shape.tile_k / KEYS_PER_STEP),
               "a product of too few or too many steps");
  (scores ? mine().scored : mine().output)++;
}

void model::end_warp() {
  const int all = (int)my_visits().size();
  sim::require(mine().scored == all && mine().output == all, "key tiles are left");
  const int rows = stores() * (int)outputs.size();
  sim::require(mine().stored == rows && mine().pieces == rows * pieces_of_row(), "rows are left");
  require_parts_ended();
}

sim::Rows model::rows() { return stored_rows; }

namespace {

const Visit &next_to_score() {
  sim::require(mine().scored < (int)my_visits().size(), "q k^T of more key tiles than there are");
  return my_visits()[(size_t)mine().scored];
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
            {KEYS, column - in_box, visit.in->of->key_row + visit.tile * shape.tile_k, visit.in->of->key_head,
             visit.in->of->batch});
  return column;
}

} // namespace

void forward::multiply_scores(uint32_t q_descriptor, uint32_t k_descriptor, int accumulate) {
  const int column = begin_step_of_scores(k_descriptor, accumulate), in_box = column % shape.box_columns;
  sim::read(sim::address_of(q_descriptor) - bytes_of_columns(in_box),
            queries(*next_to_score().in->of, column - in_box));
}

/* What it puts into the registers says of which query tile, and from which column on; lane 0 asks. */
void model::load_matrices(uint32_t *four_words, uint32_t from) {
  const QueryTile &of = *next_to_score().in->of;
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
  sim::require(sim::has_timed_out() || &tiles[q[0]] == next_to_score().in->of, "another query tile's q");
  sim::require((int)q[1] == column, "other columns of q");
}

void forward::multiply_output(uint32_t v_descriptor, int accumulate) {
  const int step = sim::step_of(OUTPUT_PRODUCT);
  sim::require(mine().output < mine().scored, "P v of a key tile that has no scores yet");
  const Visit &visit = my_visits()[(size_t)mine().output];
  sim::require((accumulate != 0) == (step > 0 || !visit.is_first), "O begins with another segment's, or loses its own");
  const uint32_t step_bytes = (uint32_t)(step * KEYS_PER_STEP * shape.row_bytes);
  for (int i = 0; i < box_count(); i++)
    sim::read(sim::address_of(v_descriptor) - step_bytes + (uint32_t)i * sim::leading_bytes_of(v_descriptor),
              {VALUES, i * shape.box_columns, visit.in->of->key_row + visit.tile * shape.tile_k, visit.in->of->key_head,
               visit.in->of->batch});
}

/* Of the row with r = 0 and of the next one. */
void forward::set_scores(float *s) {
  const int visit = mine().scored;
  sim::result(s, shape.tile_k / 2, (float)score_of(visit, 0), (float)score_of(visit, 1));
}

void forward::set_output(float *o, const uint32_t *probabilities, int accumulate) {
  float of_row[2];
  for (int r = 0; r < 2; r++) {
    const double product = sim::number_of(probabilities[r], 0) * shape.tile_k * value_of(mine().output);
    of_row[r] = (float)((accumulate ? o[2 * r] : 0.) + product);
  }
  sim::result(o, shape.head_dim / 2, of_row[0], of_row[1]);
}

void forward::require_may_store() {
  sim::require(sim::launches_have_ended(), "a store before the launches before have ended");
}

void forward::require_all_multiplied(const Segment &segment) {
  sim::require(sim::products_under_way(OUTPUT_PRODUCT) == 0 && mine().output == segment.end[my_group()],
               "a store before the last product of its segment has ended, or after the next one has begun");
}

void forward::count_row() {
  stored_rows.stored++;
  stored_rows.poisoned += sim::has_timed_out();
}

void model::store_row(const void *to, const uint32_t *four_words) {
  require_may_store();
  if (is_of_parts(to)) return store_piece(to, four_words);
  Progress &now = mine();
  const int row = now.pieces / pieces_of_row(), r = row % stores();
  const Segment &segment = segment_after(outputs, row, stores());
  require_all_multiplied(segment);
  const int64_t at = row_of_out(*segment.of, r) * shape.head_dim + now.pieces % pieces_of_row() * PIECE_COLUMNS;
  sim::require(static_cast<const char *>(to) - static_cast<char *>(OUT) == 2 * at, "a store to another row");
  const Expected expected = expect(segment, r);
  for (int i = 0; i < 4; i++) {
    const uint32_t two = four_words[i];
    if (sim::has_timed_out()) {
      sim::require(sim::is_nan(two), "out is a number after a time-out");
      continue;
    }
    sim::require(sim::is_number(two), "out is NaN without a time-out");
    const double out = expected.out / expected.sum;
    sim::require(is_close(sim::number_of(two, 0), out) && is_close(sim::number_of(two, 1), out),
                 "out is another number");
  }
  now.pieces++;
}

void model::store_number(const float *to, float x) {
  Progress &now = mine();
  require_may_store();
  const int r = now.stored % stores();
  const Segment &segment = segment_after(outputs, now.stored, stores());
  sim::require(now.scored - sim::products_under_way(SCORES_PRODUCT) >= segment.end[my_group()],
               "lse is stored before the last scores of its query tile have come");
  sim::require(to - LSE == row_of_out(*segment.of, r), "lse of another row");
  sim::require(isnan(x) == sim::has_timed_out(), "lse is NaN without a time-out, or a number after one");
  const Expected expected = expect(segment, r);
  sim::require(isnan(x) || is_close(x, log(expected.sum) + expected.shift), "lse is another number");
  now.stored++;
  count_row();
}
