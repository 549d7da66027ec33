/*
 * model.cpp - what a backward CTA has to multiply and to store.
 *
 * Checked: every product reads its warpgroup's owned rows and the walked tile that comes next, S before dP, P walk_dp
 * before dS walk_s; what comes of a product is not used before it has ended; each tile's statistics are read while they
 * are there, and before its gradients are multiplied; every tile of every walked head is visited; each row of each
 * gradient is stored where it belongs, after all products but those of dq. A warp that gave up stores NaN only. What
 * comes with dq, if the kernel computes that, too: dq.cpp.
 *
 * The lengths of a run: as many walked heads as there are, each of one tile less than the first length says, so that
 * there are also CTAs that walk nothing.
 */
#include "run.h"

using namespace backward;

namespace {

enum {
  ROWS_PER_STEP = 16,
  STEP_COLUMNS = 16, /* of one step of S */
  LANE_ROWS = 2,     /* owned rows of a lane, eight apart */
  STORE_BLOCKS = 4   /* of eight columns, that a quad stores together */
};

Walk of_run;
sim::Rows stored_rows;

bool is_computed(int product) {
  if (product == DQ) return shape.with_dq;
  return product == SCORES || (product == SUM_OF_P ? shape.with_p : shape.with_ds);
}
/* The walked tiles of dP have one place, and an mbarrier of its own. */
bool dp_is_alone() { return shape.dp_stages < shape.stages; }
int gradients() { return (int)shape.with_ds + (int)shape.with_p; }

/* Of two products that alternate, if both are computed, the one whose turn it is. */
Product turn_of(Product first, Product second) {
  const auto &committed = mine().committed;
  if (!is_computed(first)) return second;
  return is_computed(second) && committed[first] > committed[second] ? second : first;
}

/* Of a tile's walked queries, those of a lane: two of each block of eight. */
int pairs() { return shape.tile / 8; }

sim::Tile walked(int tensor, int column, int step) {
  return {tensor, column, row_of(step), head_of(step), of_run.batch};
}

void require_all_committed(const char *otherwise) {
  for (int product = 0; product < PRODUCTS; product++)
    sim::require(mine().committed[(size_t)product] == (is_computed(product) ? steps() + (product == DQ) : 0),
                 otherwise);
}

} // namespace

std::array<Progress, sim::MAX_WARPS> backward::progress;

const Walk &backward::walk() { return of_run; }

int backward::head_of(int step) { return of_run.head + step / of_run.tiles; }

int backward::row_of(int step) {
  const int nth = step % of_run.tiles;
  return (of_run.start + (shape.owns_keys ? nth : -nth)) * shape.tile;
}

sim::Layout model::begin(const std::vector<int> &lengths) {
  Walk &w = of_run;
  w.tiles = lengths[0] - 1;
  w.heads = shape.owns_keys ? (int)lengths.size() : 1;
  w.masked = sim::random(w.tiles + 1);
  w.start = shape.owns_keys ? sim::random(3) : w.tiles - 1;
  w.batch = sim::random(BATCHES);
  w.own_head = 3 + sim::random(3);
  w.head = 7 + sim::random(3);
  w.own_row = sim::random(3) * shape.warpgroups * shape.rows;
  progress.fill({});
  stored_rows = {0, 0};
  sim::Layout layout;
  layout.warps = shape.warpgroups * sim::WARPS_PER_GROUP;
  layout.barriers = shape.barriers;
  layout.mbarriers = layout.for_nothing = shape.stages + dp_is_alone();
  layout.ring = shape.stages;
  layout.mbarriers_order =
      !shape.with_dq; /* a warpgroup that only arrives at FINISHED is held back by the loads it waits for */
  const int own = shape.warpgroups * box_count(), walked = shape.stages * box_count();
  layout.boxes = {{shape.own_s, own, shape.own_box_bytes, true},
                  {shape.walk_s, walked, shape.walk_box_bytes},
                  {shape.walk_dp, shape.dp_stages * box_count(), shape.walk_box_bytes},
                  {shape.statistics, shape.stages, shape.statistics_bytes}};
  if (shape.with_ds) layout.boxes.push_back({shape.own_dp, own, shape.own_box_bytes, true});
  begin_dq(&layout);
  return layout;
}

/* The stages, and the one place of dP's tiles if there is one; with the first, the owned rows of all warpgroups. */
bool model::waits_for(int, int) { return true; }

/* The first tile in that place is awaited with the owned rows, and again in its step. */
bool model::waits_twice(int mbarrier) { return dp_is_alone() && mbarrier == shape.stages; }

void model::commit(int product, int steps_of_product) {
  const bool of_scores = product == SCORES || product == DP, of_gradient = product == SUM_OF_P || product == SUM_OF_DS;
  const int owned_rows = shape.warpgroups * shape.rows;
  sim::require(steps_of_product == (of_scores     ? shape.head_dim / STEP_COLUMNS
                                    : of_gradient ? shape.tile / ROWS_PER_STEP
                                                  : owned_rows / ROWS_PER_STEP),
               "a product of too few or too many steps");
  const int nth = ++mine().committed[(size_t)product];
  if (!shape.owns_keys || !of_gradient) return;
  sim::require(mine().read[LSE] >= nth * pairs() && (product == SUM_OF_P || mine().read[DELTA] >= nth * pairs()),
               "a sum over a tile whose statistics have not been read");
}

void model::end_warp() {
  require_all_committed("walked tiles are left");
  sim::require(mine().stored == LANE_ROWS * gradients() * shape.head_dim / (8 * STORE_BLOCKS), "rows are left");
  end_dq();
}

sim::Rows model::rows() { return stored_rows; }

void backward::multiply_scores(float *s, uint32_t own_descriptor, uint32_t walk_descriptor, int accumulate) {
  const Product product = turn_of(SCORES, DP);
  const int step = sim::step_of(product), at = mine().committed[product];
  sim::require(at < steps(), "scores of more tiles than there are");
  const int column = step * STEP_COLUMNS, in_box = column % shape.box_columns;
  const uint32_t step_bytes = (uint32_t)(in_box * shape.row_bytes / shape.box_columns);
  sim::require((accumulate != 0) == (step > 0), "S or dP begins with the sums before it, or loses its own");
  sim::read(sim::address_of(own_descriptor) - step_bytes,
            {product == SCORES ? OWN_S : OWN_DP, column - in_box, of_run.own_row + group() * shape.rows,
             of_run.own_head, of_run.batch});
  sim::read(sim::address_of(walk_descriptor) - step_bytes,
            walked(product == SCORES ? WALK_S : WALK_DP, column - in_box, at));
  sim::result(s, shape.tile / 2, 0.f, 0.f);
}

void backward::multiply_gradient(float *d, const uint32_t *scores, uint32_t walk_descriptor, int accumulate) {
  const Product product = turn_of(SUM_OF_P, SUM_OF_DS);
  const int step = sim::step_of(product), at = mine().committed[product];
  sim::require(at < mine().committed[product == SUM_OF_P ? SCORES : DP], "a sum over a tile that has no scores yet");
  sim::require(accumulate != 0, "a gradient loses its sums");
  const int tensor = product == SUM_OF_P ? WALK_DP : WALK_S;
  const uint32_t first = sim::address_of(walk_descriptor) - (uint32_t)(step * ROWS_PER_STEP * shape.row_bytes);
  for (int i = 0; i < box_count(); i++)
    sim::read(first + (uint32_t)i * sim::leading_bytes_of(walk_descriptor), walked(tensor, i * shape.box_columns, at));
  for (int i = 0; i < 4; i++)
    sim::require(sim::is_number(scores[i]), "a sum of scores that have not come");
  sim::result(d, shape.head_dim / 2, 1.f, 1.f);
}

/*
 * The statistics of each tile are read in order, lse and delta each. Those after the last tile's are not used: a kernel
 * that reads them a step ahead may find anything.
 */
void model::read_shared(uint32_t from) {
  const uint32_t offset = from - shape.statistics, stage = offset / shape.statistics_bytes;
  const uint32_t in_stage = offset % shape.statistics_bytes, statistic = in_stage % 16 / 8;
  const int nth = mine().read[statistic]++, tile = nth / pairs(), pair = nth % pairs();
  sim::require(in_stage == (uint32_t)pair * 64 + statistic * 8, "statistics of other queries"); /* lane 0's */
  sim::require(tile < steps() || (shape.with_dq && tile == steps()), "statistics of more tiles than there are");
  if (tile < steps())
    sim::read_at_once(shape.statistics + stage * shape.statistics_bytes,
                      {STATISTICS, 2 * row_of(tile), of_run.batch * HEADS + head_of(tile), 0, 0});
}

void model::store_row(const void *to, const uint32_t *four_words) {
  sim::require(sim::launches_have_ended(), "a store before the launches before have ended");
  for (int product = 0; product < PRODUCTS; product++)
    sim::require(product == DQ || sim::products_under_way(product) == 0, "a store before its product has ended");
  require_all_committed("a store before the end of the walk");
  const int parts = shape.head_dim / (8 * STORE_BLOCKS), nth = mine().stored++;
  const int part = nth % parts, gradient = nth / parts % gradients(), lane_row = nth / parts / gradients();
  const int warp = sim::warp_index() % sim::WARPS_PER_GROUP;
  const int64_t row = of_run.own_row + group() * shape.rows + warp * 16 + lane_row * 8; /* lane 0's */
  const int64_t element = of_run.batch * BATCH_STRIDE + of_run.own_head * HEAD_STRIDE + row * ROW_STRIDE;
  const uintptr_t tensor = shape.with_ds && gradient == 0 ? FROM_DS : FROM_P;
  sim::require(reinterpret_cast<uintptr_t>(to) ==
                   tensor + 2 * (uintptr_t)element + (uintptr_t)(part * STORE_BLOCKS * 16),
               "a row is stored elsewhere");
  for (int i = 0; i < 4; i++)
    sim::require(sim::has_timed_out() ? sim::is_nan(four_words[i]) : sim::is_number(four_words[i]),
                 "a gradient is NaN without a time-out, or a number after one");
  stored_rows.stored += part == 0;
  stored_rows.poisoned += part == 0 && sim::has_timed_out();
}
