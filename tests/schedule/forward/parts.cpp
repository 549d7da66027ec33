/*
 * parts.cpp - what a forward CTA has to store of rows that are not finished when a segment ends, and to read again.
 *
 * Checked: a segment that others of its query tile come after, or that is the work of this CTA alone, leaves a part,
 * after all its products: of each row the sums, which all lanes of a quad store, and its columns of O in pieces, one a
 * lane, where they belong. The next segment of the query tile reads all of it, before it stores its own there; sums are
 * stored only after a meeting of the lanes, which have then all read those before. Of a warp that gave up the sums are
 * NaN, which makes the row NaN.
 */
#include <math.h>
#include <string.h>

#include <algorithm>
#include <array>

#include "run.h"

using namespace forward;

namespace {

enum {
  PIECE = 4,     /* floats; sums are two */
  MOST_ROWS = 2, /* of a lane */
  MOST_PIECES = MOST_ROWS * 256 / 16
};

enum Kind { OF_SUMS, OF_PIECES, KINDS };

/* Of each kind, how many a warp has stored and read so far, and what is there, row after row. */
struct Parts {
  int stored[KINDS], read[KINDS];
  float there[KINDS][MOST_PIECES][PIECE];
  int meetings; /* of the lanes, when sums were read */
};

std::array<Parts, sim::MAX_WARPS> parts_of_warps;
std::vector<const Segment *> left, resumed; /* segments that leave a part; that go on with one */

Parts &my_parts() { return parts_of_warps[(size_t)sim::warp_index()]; }

int in_a_row(Kind kind) { return kind == OF_SUMS ? 1 : shape.head_dim / shape.part_columns; }
int in_a_part(Kind kind) { return stores() * in_a_row(kind); }

Kind kind_at(const float *address) { return address < OUT_OF_PARTS ? OF_SUMS : OF_PIECES; }

/*
 * Where the nth of a part is, lane 0's. Each item of a launch has its place; where segments are not split each CTA. In
 * a place, rows have their first columns one after another, then the next ones.
 */
const float *address_of(const Segment &segment, Kind kind, int nth) {
  const int64_t place = shape.splits > 1 ? &segment - segments.data() : 0;
  const int64_t rows = shape.warpgroups * shape.rows, row = row_of_lane(0, nth / in_a_row(kind));
  if (kind == OF_SUMS) return SUMS_OF_PARTS + 2 * (place * rows + row);
  return OUT_OF_PARTS + place * rows * shape.head_dim + (nth % in_a_row(kind) * rows + row) * shape.part_columns;
}

void require_sums(const Segment &segment, int row, const float *x) {
  sim::require(mine().scored - sim::products_under_way(SCORES_PRODUCT) >= segment.end[my_group()],
               "sums are stored before the last scores of their segment have come");
  sim::require(sim::meetings() > my_parts().meetings, "sums are stored where a lane may still read those before");
  const float shift = x[0], sum = x[1];
  sim::require(isnan(sum) == sim::has_timed_out(), "a sum is NaN without a time-out, or a number after one");
  const Expected expected = expect(segment, row);
  sim::require(isnan(sum) || (is_close(shift, expected.shift) && is_close(sum, expected.sum)),
               "sums are other numbers");
}

void require_piece(const Segment &segment, int row, const float *x) {
  require_all_multiplied(segment);
  const double expected = expect(segment, row).out;
  sim::require(sim::has_timed_out() || std::all_of(x, x + PIECE, [=](float f) { return is_close(f, expected); }),
               "a part is another number");
}

void store(Kind kind, const float *to, const float *x, int floats) {
  int &stored = my_parts().stored[kind];
  const Segment &segment = segment_after(left, stored, in_a_part(kind));
  const int nth = stored % in_a_part(kind);
  sim::require(to == address_of(segment, kind, nth), "another part is stored");
  (kind == OF_SUMS ? require_sums : require_piece)(segment, nth / in_a_row(kind), x);
  std::copy_n(x, floats, my_parts().there[kind][nth]);
  stored++;
}

} // namespace

void forward::begin_parts() {
  parts_of_warps.fill({});
  left.clear();
  resumed.clear();
  for (const Segment &segment : segments) {
    if (segment.is_part) left.push_back(&segment);
    if (segment.resumes) resumed.push_back(&segment);
  }
}

void forward::require_parts_ended() {
  for (const Kind kind : {OF_SUMS, OF_PIECES}) {
    sim::require(my_parts().stored[kind] == (int)left.size() * in_a_part(kind), "parts are left");
    sim::require(my_parts().read[kind] == (int)resumed.size() * in_a_part(kind), "parts are left unread");
  }
}

bool forward::is_of_parts(const void *address) { return address >= SUMS_OF_PARTS; }

void forward::store_piece(const void *to, const uint32_t *four_words) {
  float x[PIECE];
  memcpy(x, four_words, sizeof x);
  store(OF_PIECES, static_cast<const float *>(to), x, PIECE);
}

void model::store_two(const float *to, float x, float y) {
  require_may_store();
  const float sums[2] = {x, y};
  store(OF_SUMS, to, sums, 2);
  count_row();
}

void model::load_floats(float *x, const float *from, int count) {
  const Kind kind = kind_at(from);
  int &read = my_parts().read[kind];
  const Segment &segment = segment_after(resumed, read, in_a_part(kind)), &before = *(&segment - 1);
  const int nth = read % in_a_part(kind);
  sim::require(from == address_of(before, kind, nth), "another part is read");
  /* around the last product of the segment, which need not have ended */
  const int end = segment.end[my_group()];
  sim::require(end - 1 <= mine().output && mine().output <= end,
               "a part is read in a segment that does not go on with it");
  const int parts_before = (int)(std::find(left.begin(), left.end(), &before) - left.begin());
  const int stored = my_parts().stored[kind] - parts_before * in_a_part(kind); /* from that part on */
  sim::require(nth < stored && stored <= in_a_part(kind) + nth, "a part is read before or after it is there");
  std::copy_n(my_parts().there[kind][nth], count, x);
  if (kind == OF_SUMS) my_parts().meetings = sim::meetings();
  read++;
}
