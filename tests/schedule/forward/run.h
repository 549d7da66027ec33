/* run.h - what the files of the forward's model share: what a run has to do, and how far each warp of the CTA is. */
#ifndef SCHEDULE_FORWARD_RUN_H
#define SCHEDULE_FORWARD_RUN_H

#include "model.h"

namespace forward {

enum Product { SCORES_PRODUCT, OUTPUT_PRODUCT };

/* A key segment of a query tile. */
struct Segment {
  const QueryTile *of;
  int last, key_tiles;   /* the key tile that is visited first, and how many are */
  bool is_seen;          /* of split segments some are not */
  bool resumes, is_part; /* it goes on with the part of the segment before; what it leaves is a part, not the output */
  /* Of all visits of a warpgroup: the first one that counts for what the segment leaves, and the end of its own. */
  int first_of_rows[MAX_GROUPS], end[MAX_GROUPS];
};
extern std::vector<Segment> segments; /* in the order of visits */

/* How far a warp is: key tiles multiplied, q k^T and P v; rows of lse stored, and pieces of 16 bytes of out. */
struct Progress {
  int scored, output, stored, pieces;
};
Progress &mine(); /* of the warp that runs */

int my_group();                            /* of the warp that runs */
int stores();                              /* how many rows of a query tile a lane stores */
int64_t row_of_lane(int64_t first, int r); /* of its rows, where those of a query tile begin with this one; lane 0's */

/* The segment of which is what a warp stores or reads next, after so many, if there are so many of each. */
const Segment &segment_after(const std::vector<const Segment *> &of, int count, int each);

/* What a segment leaves of a row: what was subtracted from scores, the sum of weights, and O. */
struct Expected {
  double shift, sum, out;
};
Expected expect(const Segment &segment, int row);
bool is_close(double x, double expected);

void require_may_store();
void require_all_multiplied(const Segment &segment);
void count_row(); /* that was stored */

/* parts.cpp */
void begin_parts(); /* a new run */
bool is_of_parts(const void *address);
void store_piece(const void *to, const uint32_t *four_words); /* the same of a part as store_row of an output */
void require_parts_ended();                                   /* all were stored, and read, by the warp that runs */

} // namespace forward

#endif
