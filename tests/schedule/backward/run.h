/* run.h - what the files of the backward's model share: the walk of a run, and how far each warp is. */
#ifndef SCHEDULE_BACKWARD_RUN_H
#define SCHEDULE_BACKWARD_RUN_H

#include <array>

#include "model.h"

namespace backward {

enum Product { SCORES, DP, SUM_OF_P, SUM_OF_DS, DQ, PRODUCTS };
enum Statistic { LSE, DELTA, STATISTICS_OF_ROW };

/* How far a warp is: products committed, pairs of statistics read, and 16-byte parts of rows stored. */
struct Progress {
  std::array<int, PRODUCTS> committed;
  std::array<int, STATISTICS_OF_ROW> read;
  int stored;
};

extern std::array<Progress, sim::MAX_WARPS> progress;

inline Progress &mine() { return progress[(size_t)sim::warp_index()]; }
inline int box_count() { return shape.head_dim / shape.box_columns; }
inline int group() { return sim::warp_index() / sim::WARPS_PER_GROUP; }
inline int warp_of_group() { return sim::warp_index() % sim::WARPS_PER_GROUP; }
inline int steps() { return walk().heads * walk().tiles; }
int head_of(int step);
int row_of(int step); /* the first of its tile */

/* dq.cpp: what comes with dq. */
void begin_dq(sim::Layout *layout);
void end_dq();

} // namespace backward

#endif
