/* products.cpp - matrix products, and how matrices come from shared memory: see machine.h. */
#include <string.h>

#include "machine.h"

namespace emulated {

namespace {

enum { DEPTH = 16, GROUP_ROWS = 8 };

float element(uint32_t bits) {
  float x;
  bits <<= 16;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* One of the two in a register. */
float element_of(const uint32_t *registers, int i) { return element(registers[i / 2] >> i % 2 * 16 & 0xffff); }

/* In the 128-byte swizzle. */
float element_at(uint32_t address) {
  uint16_t bits;
  memcpy(&bits, shared(address ^ (address >> 7 & 7) << 4, sizeof bits), sizeof bits);
  return element(bits);
}

/* The order of every sum. */
float add_products(float sum, const float *left, const float *right) {
  for (int k = 0; k < DEPTH; k++)
    sum += left[k] * right[k];
  return sum;
}

} // namespace

void multiply(float *d, const Operand &a, uint32_t b, uint32_t leading_bytes, bool is_transposed, int columns,
              bool accumulate) {
  enum { ROWS = 64, ROW_BYTES = 128, BOX_COLUMNS = 64 };
  struct Mine {
    float *d;
    const uint32_t *a;
  } mine = {d, a.registers};
  meet(WARPGROUP, (uint64_t)&mine, [&](const uint64_t *all) {
    float left[ROWS][DEPTH];
    for (int t = 0; t < WARPGROUP; t++) /* of registers: two columns in each, rows l / 4 and l / 4 + 8, twice */
      for (int i = 0; i < 8 && a.registers; i++)
        left[t / WARP * 16 + t % WARP / 4 + i / 2 % 2 * 8][t % 4 * 2 + i % 2 + i / 4 * 8] =
            element_of(reinterpret_cast<const Mine *>(all[t])->a, i);
    for (int i = 0; i < ROWS * DEPTH && !a.registers; i++)
      left[i / DEPTH][i % DEPTH] = element_at(a.address + (uint32_t)(i / DEPTH / GROUP_ROWS) * a.group_bytes +
                                              (uint32_t)(i / DEPTH % GROUP_ROWS * ROW_BYTES + i % DEPTH * 2));
    for (int column = 0; column < columns; column++) {
      float right[DEPTH];
      for (int k = 0; k < DEPTH; k++) {
        const uint32_t across = (uint32_t)(column / BOX_COLUMNS) * leading_bytes + (uint32_t)(column % BOX_COLUMNS * 2);
        right[k] = element_at(
            b + (is_transposed ? across + (uint32_t)(k * ROW_BYTES) : (uint32_t)(column * ROW_BYTES + k * 2)));
      }
      for (int row = 0; row < ROWS; row++) {
        const int t = row / 16 * WARP + row % 8 * 4 + column % 8 / 2;
        float &sum = reinterpret_cast<const Mine *>(all[t])->d[column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
        sum = add_products(accumulate ? sum : 0.f, left[row], right);
      }
    }
  });
}

void multiply_eight_rows(float *d, const uint32_t *a, const uint32_t *b) {
  struct Mine {
    float *d;
    const uint32_t *a, *b;
  } mine = {d, a, b};
  meet(WARP, (uint64_t)&mine, [](const uint64_t *all) {
    float left[GROUP_ROWS][DEPTH], right[GROUP_ROWS][DEPTH];
    for (int l = 0; l < WARP; l++)
      for (int i = 0; i < 4; i++) {
        const Mine &one = *reinterpret_cast<const Mine *>(all[l]);
        const int k = l % 4 * 2 + i % 2 + i / 2 * 8;
        left[l / 4][k] = element_of(one.a, i);
        right[l / 4][k] = element_of(one.b, i);
      }
    for (int l = 0; l < WARP; l++)
      for (int i = 0; i < 2; i++) {
        float &sum = reinterpret_cast<const Mine *>(all[l])->d[i];
        sum = add_products(sum, left[l / 4], right[l % 4 * 2 + i]);
      }
  });
}

void load_matrices(uint32_t *x, int count, uint32_t from, bool is_transposed) {
  enum { ROW_BYTES = 16 };
  const int lane = thread_index() % WARP;
  if (lane < GROUP_ROWS * count) read_late(from, ROW_BYTES);
  const uint64_t *const rows = exchange(from);
  for (int m = 0; m < count; m++) {
    uint16_t two[2];
    for (int i = 0; i < 2; i++) {
      const int row = is_transposed ? lane % 4 * 2 + i : lane / 4, column = is_transposed ? lane / 4 : lane % 4 * 2 + i;
      memcpy(&two[i], shared((uint32_t)rows[GROUP_ROWS * m + row], ROW_BYTES) + 2 * column, sizeof *two);
    }
    memcpy(&x[m], two, sizeof *x);
  }
}

void store_matrices_transposed(uint32_t to, const uint32_t *x) {
  enum { MATRICES = 4, COLUMNS = 8 };
  const int lane = thread_index() % WARP, column = lane % COLUMNS;
  uint16_t of_column[GROUP_ROWS] = {};
  for (int m = 0; m < MATRICES; m++) { /* lane l has two columns of row l / 4 */
    const uint64_t *const all = exchange(x[m]);
    for (int row = 0; row < GROUP_ROWS && lane / COLUMNS == m; row++)
      of_column[row] = (uint16_t)(all[4 * row + column / 2] >> column % 2 * 16);
  }
  uint32_t words[GROUP_ROWS / 2];
  memcpy(words, of_column, sizeof words);
  store_shared(to, sizeof words, words);
}

} // namespace emulated
