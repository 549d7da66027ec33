/*
 * main.cpp - runs the simulator over every sequence of up to WALKS walks of 1 to TILES key tiles, each under several
 * random schedules: main WALKS TILES SCHEDULES SEED TIME_OUTS.
 */
#include <stdio.h>
#include <stdlib.h>

#include "simulator.h"

/* The next sequence of this length in lexicographic order; false after the last. */
static bool advance(std::vector<int> &tiles, int most) {
  for (size_t i = tiles.size(); i-- > 0;) {
    if (tiles[i] < most) {
      tiles[i]++;
      return true;
    }
    tiles[i] = 1;
  }
  return false;
}

int main(int argc, char **argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: main WALKS TILES SCHEDULES SEED TIME_OUTS\n");
    return 2;
  }
  const int walks = atoi(argv[1]), most_tiles = atoi(argv[2]), schedules = atoi(argv[3]);
  unsigned seed = (unsigned)strtoul(argv[4], nullptr, 10);
  const bool with_time_outs = atoi(argv[5]) != 0;

  long runs = 0;
  sim::Rows rows = {0, 0};
  for (int length = 1; length <= walks; length++) {
    std::vector<int> tiles((size_t)length, 1);
    do {
      for (int i = 0; i < schedules; i++) {
        const sim::Rows of_run = sim::run(tiles, seed++, with_time_outs);
        rows.stored += of_run.stored;
        rows.poisoned += of_run.poisoned;
        runs++;
      }
    } while (advance(tiles, most_tiles));
  }
  printf("%ld runs, %ld rows stored, %ld poisoned\n", runs, rows.stored, rows.poisoned);
  return 0;
}
