/*
 * dq.cpp - what a backward CTA that computes dq, too, has to exchange, to multiply and to send.
 *
 * The products of dq are numbered, and so are the shares that come of them: number n is of the dS of step n - 1. Number
 * 0 is of nothing: it may be of any bits, and goes nowhere.
 *
 * Checked: each warp writes its keys of each step's dS, of numbers; product n reads its 64 rows of that dS, in the
 * buffer of that step, and its 64 columns of k; share n is written as integers in units of its own rows, goes once to
 * where these rows are, and marks those that have a NaN; past the last query row there is no share. In the end all
 * blocks of all walked heads have got one share of this CTA, in all columns. A warp that gave up says so in `failed`.
 */
#include <math.h>

#include <algorithm>
#include <map>

#include "run.h"

namespace backward {
namespace {

enum {
  SLICE = 16,         /* keys of one step of a product: those that one warp wrote */
  PART_ROWS = 64,     /* of dS, of a product */
  BLOCK = 16,         /* of these, a warp's */
  LANE_ROWS = 2,      /* of these, a lane's, eight apart */
  FLOATS = 32,        /* that a lane has of them */
  FOURS = FLOATS / 4, /* stores of a share by a lane */
  BLOCK_INTEGERS = BLOCK * 64,
  BLOCK_BYTES = BLOCK_INTEGERS * 4
};
constexpr uint32_t NAN_UNIT = 255; /* ../../../csrc/families/delta/params.h */

/* How far a warp is: matrices of dS, fours of shares, marks of shares; its last share sent; times it told of a failure.
 */
struct Sent {
  int matrices, fours, marks, share, failures;
};

struct Place {
  int head, column_box, block;
};

bool operator<(const Place &a, const Place &b) {
  if (a.head != b.head) return a.head < b.head;
  return a.column_box != b.column_box ? a.column_box < b.column_box : a.block < b.block;
}

std::array<Sent, sim::MAX_WARPS> progress_of_dq;
std::map<Place, int> shares; /* how many have been sent there */
int rows_of_queries, warps_ended;
unsigned nan_bits;

Sent &my_dq() { return progress_of_dq[(size_t)sim::warp_index()]; }

int blocks() { return (rows_of_queries + BLOCK - 1) / BLOCK; }

/* With one box of columns, each warpgroup has half of the rows; with two, half of the columns. */
int column_box() { return box_count() == 1 ? 0 : group(); }
int first_row_of_part() { return box_count() == 1 ? group() * PART_ROWS : 0; }

Place place_of(int n) {
  return {head_of(n - 1), column_box(), (row_of(n - 1) + first_row_of_part()) / BLOCK + warp_of_group()};
}

bool exists(int n) { return n > 0 && place_of(n).block < blocks(); }

/* One in four of all lanes' rows. */
bool has_nan(int n, int lane_row) {
  const unsigned bit = (unsigned)(n * 5 + sim::warp_index() * 3 + lane_row) % 15;
  return (nan_bits >> bit & nan_bits >> (bit + 15) & 1) != 0;
}

int unit_index(int n, int lane_row) {
  const Place at = place_of(n);
  const int row = std::min(at.block * BLOCK + 8 * lane_row, rows_of_queries - 1); /* lane 0's */
  return (walk().batch * HEADS + at.head) * rows_of_queries + row;
}

/* Of a step and of keys. */
uint32_t ds_area(int step, int of_group, int slice) {
  return shape.ds + (uint32_t)(step & 1) * shape.ds_bytes + (uint32_t)(of_group * shape.tile * shape.row_bytes) +
         (uint32_t)(slice * SLICE * 2);
}

uint32_t share_area() { return shape.shares + (uint32_t)(sim::warp_index() * BLOCK_BYTES); }

} // namespace

int query_rows() { return rows_of_queries; }

void begin_dq(sim::Layout *layout) {
  const Walk &w = walk();
  progress_of_dq.fill({});
  shares.clear();
  warps_ended = 0;
  nan_bits = (unsigned)sim::random(1 << 30);
  rows_of_queries = std::max(w.start + w.tiles, 1) * shape.tile - sim::random(shape.tile);
  if (!shape.with_dq) return;
  for (int warp = 0; warp < layout->warps; warp++) {
    const int of_group = warp / sim::WARPS_PER_GROUP, slice = warp % sim::WARPS_PER_GROUP;
    layout->areas.push_back(ds_area(0, of_group, slice));
    layout->areas.push_back(ds_area(1, of_group, slice));
    layout->areas.push_back(shape.shares + (uint32_t)(warp * BLOCK_BYTES));
  }
}

void end_dq() {
  if (!shape.with_dq) return;
  const Sent &my = my_dq();
  int last = steps();
  while (last > 0 && !exists(last))
    last--;
  sim::require(my.matrices == steps() * shape.tile / 16, "dS is left");
  sim::require(my.fours == FOURS * (steps() + 1) && my.marks == steps() + 1, "shares are left");
  sim::require(my.share == last, "a share was not sent");
  sim::require(my.failures == (int)sim::has_timed_out(), "a warp that timed out has not said so");
  if (++warps_ended < sim::warp_count()) return;
  const Walk &w = walk();
  size_t places = 0;
  for (int head = w.head; head < w.head + w.heads; head++)
    for (int block = w.start * shape.tile / BLOCK; w.tiles > 0 && block < blocks(); block++)
      for (int box = 0; box < box_count(); box++, places++)
        sim::require(shares[{head, box, block}] == 1, "a block of query rows has got no share, or two");
  sim::require(shares.size() == places, "a share of rows that are not walked");
}

void multiply_dq(float *dq, uint32_t ds_descriptor, uint32_t k_descriptor, int accumulate) {
  const int step = sim::step_of(DQ), n = mine().committed[DQ];
  const int of_group = step / (shape.rows / SLICE), slice = step % (shape.rows / SLICE);
  sim::require(n <= steps() && of_group < shape.warpgroups, "a product of dq over more than there is");
  sim::require((accumulate != 0) == (step > 0), "dq begins with the sums before it, or loses its own");
  const float number[] = {exists(n) && !has_nan(n, 0) ? (float)n : NAN, exists(n) && !has_nan(n, 1) ? (float)n : NAN};
  sim::result(dq, FLOATS, number[0], number[1]);
  if (steps() == 0) return; /* nothing was loaded */
  sim::read(
      sim::address_of(k_descriptor) - (uint32_t)(slice * SLICE * shape.row_bytes),
      {OWN_S, column_box() * shape.box_columns, walk().own_row + of_group * shape.rows, walk().own_head, walk().batch});
  if (n == 0) return;
  const uint32_t area = ds_area(n - 1, of_group, slice);
  sim::require(sim::address_of(ds_descriptor) == area + (uint32_t)(first_row_of_part() * shape.row_bytes),
               "a product of dq reads elsewhere than in the dS of the step before");
  sim::read_area(area, n - 1);
}

} // namespace backward

using namespace backward;

void model::store_matrices(uint32_t to, const uint32_t *four_words) {
  const int each_step = shape.tile / 16, nth = my_dq().matrices++, step = nth / each_step, part = nth % each_step;
  sim::require(step < steps() && mine().committed[DP] == step + 1, "dS of another step is stored");
  for (int i = 0; i < 4; i++)
    sim::require(sim::is_number(four_words[i]), "dS is stored before its scores have come");
  const uint32_t area = ds_area(step, group(), warp_of_group());
  sim::require(to == area + (uint32_t)(part * 16 * shape.row_bytes), "dS is stored elsewhere"); /* lane 0's */
  sim::write_area(area, step, part == 0, part + 1 == each_step);
}

void model::store_shared(uint32_t to, const int32_t *four_words) {
  Sent &my = my_dq();
  const int nth = my.fours++, n = nth / FOURS, part = nth % FOURS;
  sim::require(n < mine().committed[DQ], "a share before its product");
  sim::require(!exists(n - 1) || my.share == n - 1, "a share that was not sent is overwritten");
  sim::require(to == share_area() + (uint32_t)(part * BLOCK_BYTES / FOURS), "a share is stored elsewhere");
  for (int i = 0; exists(n) && i < 4; i++) {
    const int expected = has_nan(n, i / 2) ? 0 : n << exponent_of_unit(unit_index(n, i / 2));
    sim::require(four_words[i] == expected, "a share is not of its product, or in the units of other rows");
  }
  sim::write_area(share_area(), n, part == 0, part + 1 == FOURS);
}

/* A warp's line of the words that nobody reads: eight bytes of each of the CTA's keys, shared out among its warps. */
static uintptr_t own_line() {
  const int64_t key = (int64_t)(walk().batch * HEADS + walk().own_head) * ROWS_OF_HEAD + walk().own_row;
  return SPENT + (uintptr_t)(key * 8 + sim::warp_index() * 128);
}

/* Lane 0 tells of the rows whose units are in a word with that of the first, each of which here is lane 0's first. */
void model::set_bits(const void *to, uint32_t bits) {
  const int n = my_dq().marks++;
  sim::require(sim::launches_have_ended(), "a mark before the launches before have ended");
  sim::require(n < mine().committed[DQ], "marks of a share before its product");
  if (!exists(n)) {
    sim::require(bits == 0, "marks of a share that there is not");
    sim::require(reinterpret_cast<uintptr_t>(to) == own_line(), "a warp with nothing to tell goes where others go");
    return;
  }
  const uintptr_t first = reinterpret_cast<uintptr_t>(units() + unit_index(n, 0)), before = first % 4;
  uint32_t marks = 0;
  for (int row = 0; row < 4 - (int)before && place_of(n).block * BLOCK + row < rows_of_queries; row++)
    marks |= NAN_UNIT << 8 * ((int)before + row);
  sim::require(bits == (has_nan(n, 0) ? marks : 0), "a NaN is not marked, or there is none");
  sim::require(reinterpret_cast<uintptr_t>(to) == first - before, "other rows are marked");
}

void model::add(const int32_t *to, uint32_t from, int bytes) {
  Sent &my = my_dq();
  const int n = my.fours / FOURS - 1;
  sim::require(sim::launches_have_ended(), "a bulk sum before the launches before have ended");
  sim::require(n > my.share && exists(n), "a share is sent twice, or one that there is not");
  sim::require(my.fours % FOURS == 0 && from == share_area() && bytes == BLOCK_BYTES, "not one share is sent");
  const Place at = place_of(n);
  const int64_t block = ((int64_t)(walk().batch * HEADS + at.head) * box_count() + at.column_box) * blocks() + at.block;
  sim::require(reinterpret_cast<uintptr_t>(to) == SUMS + (uintptr_t)(block * BLOCK_BYTES), "a share is sent elsewhere");
  sim::add_area(from, n);
  my.share = n;
  shares[at]++;
}

void model::store_number(const float *to, float x) {
  const uintptr_t failed = FAILED + sizeof(float) * (uintptr_t)(walk().batch * HEADS + walk().own_head);
  sim::require(shape.with_dq && sim::has_timed_out(), "a failure without a time-out");
  sim::require(reinterpret_cast<uintptr_t>(to) == failed && isnan(x), "another failure");
  my_dq().failures++;
}
