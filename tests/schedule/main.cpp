/*
 * main.cpp - runs the simulator over every sequence of up to TILES tiles with loops of 1 to LENGTH steps, each under
 * several random schedules: main TILES LENGTH SCHEDULES SEED TIME_OUTS.
 */
#include <stdio.h>
#include <stdlib.h>

#include "simulator.h"

/* The next sequence of this length in lexicographic order; false after the last. */
static bool advance(std::vector<int> &lengths, int most) {
  for (size_t i = lengths.size(); i-- > 0;) {
    if (lengths[i] < most) {
      lengths[i]++;
      return true;
    }
    lengths[i] = 1;
  }
  return false;
}

int main(int argc, char **argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: main TILES LENGTH SCHEDULES SEED TIME_OUTS\n");
    return 2;
  }
  const int tiles = atoi(argv[1]), most_steps = atoi(argv[2]), schedules = atoi(argv[3]);
  unsigned seed = (unsigned)strtoul(argv[4], nullptr, 10);
  const bool with_time_outs = atoi(argv[5]) != 0;

  long runs = 0;
  sim::Rows rows = {0, 0};
  for (int count = 1; count <= tiles; count++) {
    std::vector<int> lengths((size_t)count, 1);
    do {
      for (int i = 0; i < schedules; i++) {
        const sim::Rows of_run = sim::run(lengths, seed++, with_time_outs);
        rows.stored += of_run.stored;
        rows.poisoned += of_run.poisoned;
        runs++;
      }
    } while (advance(lengths, most_steps));
  }
  printf("%ld runs, %ld rows stored, %ld poisoned\n", runs, rows.stored, rows.poisoned);
  return 0;
}
