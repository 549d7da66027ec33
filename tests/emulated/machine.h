/*
 * machine.h - CTAs of a kernel on the host, thread by thread and number by number: what a kernel computes, without a
 * GPU. Each thread is a coroutine; the stubs of stubs/ call this where the device has an instruction.
 *
 * Barriers, shuffles, elections, TMA boxes with their swizzle, and wgmma on its register layout and descriptors are
 * those of PTX ISA 9.0. Loads and products are done at once: whether a kernel waits for them is what tests/schedule
 * asks. Elements are bfloat16; a product's sums are float32, in an order of their own: bits are those of this machine
 * and of no GPU, but the same wherever the same products are made.
 */
#ifndef EMULATED_MACHINE_H
#define EMULATED_MACHINE_H

#include <stdint.h>

namespace emulated {

enum {
  WARP = 32,
  WARPGROUP = 128,
  SHARED_ADDRESS = 16, /* of shared memory: CUDA aligns it to 16 bytes */
  SHARED_BYTES = 227 << 10
};

/* A tensor in global memory: sizes, strides and box from the innermost dimension on. Elements outside are zero. */
struct TensorMap {
  const char *data;
  int64_t size[4], stride_bytes[4];
  int box_rows, box_heads;
};

/* A kernel that the library has, as a function of a launch's arguments. */
struct Launchable {
  Launchable(const char *name, void (*kernel)(void **arguments));
};

/* Runs it. Returns NULL, or a sentence that says what cannot be. */
const char *launch(const char *name, int64_t grid, int threads, void **arguments);

/* ---- of the thread that runs ------------------------------------------------------------------------------------ */

int thread_index();
int block_index();
int grid_size();

void require(bool holds, const char *what); /* or the run ends with this sentence */

/* Bytes of shared memory. */
char *shared(uint32_t address, int bytes);

void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier, int64_t bytes);
void mbarrier_await(uint32_t barrier, uint32_t parity);
void named_barrier(int id, int threads, bool wait);

/* All lanes meet; true in the one that acts for them. */
bool elect();
/* The values that all lanes of the warp bring. */
const uint64_t *exchange(uint64_t value);

void load_box(uint32_t destination, uint32_t barrier, const TensorMap &map, const int *corner);

/*
 * d[64, columns] (+)= a[64, 16] b[columns, 16]^T of a warpgroup, as lane and register hold them. a: four registers, or
 * an address in shared memory, rows of 128 bytes, `group_bytes` from eight rows to the next eight.
 */
struct Operand {
  const uint32_t *registers; /* or NULL, and: */
  uint32_t address, group_bytes;
};
/* is_transposed: b lies as [16, columns], in boxes of 64 columns `leading_bytes` apart. */
void multiply(float *d, const Operand &a, uint32_t b, uint32_t leading_bytes, bool is_transposed, int columns,
              bool accumulate);

} // namespace emulated

#endif
