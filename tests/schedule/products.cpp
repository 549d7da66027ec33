/*
 * products.cpp - wgmma groups under way, and shared memory that they read.
 */
#include "machine.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace sim {

int products_under_way(int product) {
  const auto &pending = self().pending;
  return (int)std::count_if(pending.begin(), pending.end(), [=](const Group &g) { return g.product == product; });
}

int step_of(int product) {
  Group &open = self().open;
  if (open.product < 0) give_way();
  require(open.product < 0 || open.product == product, "one group of two products");
  open.product = product;
  return open.steps++;
}

/* The box there, which has to hold this tile. */
static Box &box_at(uint32_t address, const Tile &tile) {
  const auto box = std::find_if(boxes.begin(), boxes.end(), [=](const Box &b) { return b.start == address; });
  require(box != boxes.end(), "a read where no box begins");
  const Warp &w = self();
  const int later = box->barrier < 0 ? -1 : w.seen[box->barrier] - (box->phase + 1); /* phases that were seen since */
  const bool has_arrived = !box->under_way && (box->stays ? later >= 0 : later == 0);
  require(w.timed_out() || (has_arrived && box->holds == tile), "a read of a tile that is wrong or not there");
  return *box;
}

static Area &area_at(uint32_t start) {
  const auto area = std::find_if(areas.begin(), areas.end(), [=](const Area &a) { return a.start == start; });
  require(area != areas.end(), "an address where no area begins");
  return *area;
}

void read(uint32_t address, const Tile &tile) {
  Box &box = box_at(address, tile);
  box.reads[(size_t)current]++;
  self().open.reads.push_back(&box);
}

void read_at_once(uint32_t address, const Tile &tile) {
  Box &box = box_at(address, tile);
  tick();
  if (!self().timed_out()) box.read[(size_t)current] = self().clock[(size_t)current];
}

/* ---- areas ----------------------------------------------------------------------------------------------------- */

void read_area(uint32_t start, int content) {
  Area &area = area_at(start);
  Warp &w = self();
  require(area.complete && area.content == content, "a product reads what is not, or no longer, written");
  require(area.fenced >= 0, "a product reads what was written, and no fence followed");
  require(area.fenced <= w.clock[(size_t)area.writer], "a product does not come after the fence after what it reads");
  area.reads[(size_t)current]++;
  w.open.areas.push_back(&area);
}

void write_area(uint32_t start, int content, bool is_first, bool is_last) {
  if (is_first) give_way();
  tick();
  Area &area = area_at(start);
  const Clock &now = self().clock;
  require(area.sum == Area::AT_REST, "a store over what a bulk sum reads, as far as all lanes know");
  for (size_t i = 0; i < MAX_WARPS; i++) {
    require(area.reads[i] == 0, "a store over what a product reads");
    require(area.read[i] <= now[i], "a store that does not come after the last read");
  }
  require(is_first || (!area.complete && area.content == content), "an area of two contents");
  area.writer = current;
  area.content = content;
  area.complete = is_last;
  area.fenced = -1;
  area.synced = false;
}

void fence_async() {
  tick();
  for (Area &area : areas) {
    if (area.writer != current || area.fenced >= 0) continue;
    area.fenced = self().clock[(size_t)current];
  }
}

void sync_warp() {
  for (Area &area : areas) {
    if (area.writer != current) continue;
    area.synced = area.fenced >= 0;
    if (area.sum == Area::READ) area.sum = Area::AT_REST;
  }
}

void add_area(uint32_t start, int content) {
  give_way();
  Area &area = area_at(start);
  require(area.writer == current && area.complete && area.content == content, "a bulk sum of what is not written");
  require(area.synced, "a bulk sum before all lanes have fenced what they wrote");
  require(area.sum == Area::AT_REST, "two bulk sums of one content");
  area.sum = Area::ADDED;
}

void commit_sums() {
  for (Area &area : areas)
    if (area.writer == current && area.sum == Area::ADDED) area.sum = Area::COMMITTED;
}

void await_sums() {
  give_way();
  for (Area &area : areas)
    if (area.writer == current && area.sum == Area::COMMITTED) area.sum = Area::READ;
}

/* ---- elements --------------------------------------------------------------------------------------------------- */

uint32_t element_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return isnan(x) ? 0x7fc0 : bits >> 16;
}

float number_of(uint32_t packed, int which) {
  const uint32_t bits = which ? packed & 0xffff0000 : packed << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

bool is_nan(uint32_t packed) { return isnan(number_of(packed, 0)) && isnan(number_of(packed, 1)); }
bool is_number(uint32_t packed) { return !isnan(number_of(packed, 0)) && !isnan(number_of(packed, 1)); }

/* ---- products in flight ---------------------------------------------------------------------------------------- */

static void fill(const Result &result, float even, float odd) {
  for (int i = 0; i < result.count; i++)
    result.to[i] = i / 2 % 2 ? odd : even;
}

void result(float *to, int count, float of_row, float of_next_row) {
  Result &mine = self().open.result;
  require(mine.to == nullptr || mine.to == to, "one group of two accumulators");
  if (mine.to != nullptr) return;
  mine = {to, count, {of_row, of_next_row}};
  fill(mine, NAN, NAN);
}

void commit_products() {
  tick();
  Warp &w = self();
  require(w.open.product >= 0, "a group without products");
  model::commit(w.open.product, w.open.steps);
  w.pending.push_back(w.open);
  w.open = {};
  give_way();
}

void await_products(int pending) {
  give_way();
  tick();
  Warp &w = self();
  while ((int)w.pending.size() > pending) {
    for (Box *box : w.pending.front().reads) {
      box->reads[(size_t)current]--;
      if (!w.timed_out()) box->read[(size_t)current] = w.clock[(size_t)current];
    }
    for (Area *area : w.pending.front().areas) {
      area->reads[(size_t)current]--;
      area->read[(size_t)current] = w.clock[(size_t)current];
    }
    const Result &done = w.pending.front().result;
    fill(done, done.of_row[0], done.of_row[1]);
    w.pending.erase(w.pending.begin());
  }
}

} // namespace sim
