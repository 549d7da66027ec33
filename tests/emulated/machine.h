/*
 * machine.h - CTAs of a kernel on the host, thread by thread and number by number: what a kernel computes, without a
 * GPU. Each thread is a coroutine; the stubs of stubs/ call this where the device has an instruction. The CTAs of a
 * cluster run together, clusters one after another.
 *
 * Barriers, shuffles, elections, TMA boxes with their swizzle, mma, and wgmma on its register layout and descriptors
 * are those of PTX ISA 9.0. Which thread goes on is random, and so is when a TMA box or a store into another CTA
 * arrives: whoever does not wait for it finds something else. Products are done at once: whether a kernel waits for
 * them is what tests/schedule asks. Elements are bfloat16; a product's sums are float32, in an order of their own: bits
 * are those of this machine and of no GPU, but the same wherever the same products are made, by mma or by wgmma.
 */
#ifndef EMULATED_MACHINE_H
#define EMULATED_MACHINE_H

#include <stdint.h>

#include <functional>

namespace emulated {

enum {
  WARP = 32,
  WARPGROUP = 128,
  SHARED_ADDRESS = 16, /* of shared memory: CUDA aligns it to 16 bytes */
  SHARED_BYTES = 227 << 10
};

/* A tensor in global memory: sizes, strides and box from the innermost dimension on. Elements outside are zero. If
 * there is a swizzle, it is as wide as a row of the box: 64 or 128 bytes. */
struct TensorMap {
  const char *data;
  int64_t size[4], stride_bytes[4];
  int box_columns, box_rows, box_heads, element_bytes;
  bool is_swizzled;
};

/* A kernel that the library has, as a function of a launch's arguments; CTAs of a cluster. */
struct Launchable {
  Launchable(const char *name, int cluster, void (*kernel)(void **arguments));
};

/* Of the launches to come: a seed of what is random, and which of its loads each of them waits for in vain; negative:
 * none. */
void disturb(unsigned seed, int lost_load);

/* Runs it. Returns NULL, or a sentence that says what cannot be. */
const char *launch(const char *name, int64_t grid, int threads, void **arguments);

/* ---- of the thread that runs ------------------------------------------------------------------------------------ */

int thread_index();
int block_index();
int block_size();
int grid_size();

void require(bool holds, const char *what); /* or the run ends with this sentence */

/* Where an address of this CTA's shared memory is in that of another CTA of the cluster. */
uint32_t address_in_cta(uint32_t address, int rank);
/* Bytes of this CTA's shared memory. */
char *shared(uint32_t address, int bytes);
/* The same for an instruction whose reads may end as late as this thread comes to a barrier: until then TMA must not be
 * asked to write there. */
const char *read_late(uint32_t address, int bytes);

void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier, int64_t bytes);
bool has_come(uint32_t barrier, uint32_t parity);
bool mbarrier_test(uint32_t barrier, uint32_t parity);  /* by a warp, whose lanes are told alike */
bool mbarrier_await(uint32_t barrier, uint32_t parity); /* by a warp; false: in vain */
void named_barrier(int id, int threads, bool wait);
void cluster_arrive();
void cluster_wait();

/*
 * All `lanes` threads of a warp or a warpgroup meet; the last one acts for all before the others go on. Returns what
 * they bring, which stays until the meeting after the next.
 */
const uint64_t *meet(int lanes, uint64_t brought, const std::function<void(const uint64_t *)> &act);

/* All lanes meet; true in the one that acts for them. */
bool elect();
/* The values that all lanes of the warp bring. */
const uint64_t *exchange(uint64_t value);

void load_box(uint32_t destination, uint32_t barrier, const TensorMap &map, const int *corner);
/* Of this thread, into this CTA's shared memory. Before the bytes may be copied, it has to pass a fence, and then a
 * barrier. */
void store_shared(uint32_t to, int bytes, const uint32_t *words);
void fence_async();
/* Adds integers of this CTA's shared memory to others, when this thread waits until that is done. */
void add_later(int32_t *to, uint32_t from, int bytes);
void await_additions();
/* By all lanes: 4 bytes into a CTA of the cluster, which has the mbarrier, too. */
void store_async(uint32_t destination, uint32_t barrier, int bytes, const uint32_t *words);
/* The same of what lies in this CTA's shared memory. */
void copy_async(uint32_t destination, uint32_t from, int bytes, uint32_t barrier);

/* ---- products.cpp ----------------------------------------------------------------------------------------------- */

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

/* d[8, 8] += a[8, 16] b[8, 16]^T of a warp: two floats, and two registers of each operand. */
void multiply_eight_rows(float *d, const uint32_t *a, const uint32_t *b);

/* `count` 8x8 matrices: lane 8 m + i has the address of row i of matrix m, lane l gets two columns of row l / 4 of
 * each, or, is_transposed, two rows of column l / 4. */
void load_matrices(uint32_t *x, int count, uint32_t from, bool is_transposed);

/* The other way, four of them, transposed: lane 8 m + i has the address of column i of matrix m. */
void store_matrices_transposed(uint32_t to, const uint32_t *x);

} // namespace emulated

#endif
