/* tile_rows.h - rows of q, k, v and out, from and to float32. */
#ifndef DHP_CPU_TILE_ROWS_H
#define DHP_CPU_TILE_ROWS_H

#include "tile_vectors.h"

static size_t element_size(dhp_dtype dtype) { return dtype == DHP_FLOAT32 ? sizeof(float) : sizeof(uint16_t); }

static char *row_pointer(const dhp_tensor *t, int64_t b, int64_t h, int64_t s) {
  const int64_t offset = b * t->stride[0] + h * t->stride[1] + s * t->stride[2];
  return (char *)t->data + offset * (int64_t)element_size(t->dtype);
}

/* Where row i of a unit is: its rows are of so many heads, which run faster than the positions. */
static int64_t head_of(const dhp_cpu_rows *rows, int i) { return rows->head + i % rows->heads; }
static int64_t position_of(const dhp_cpu_rows *rows, int i) { return rows->first + i / rows->heads; }

/* Of 16-bit elements in the low halves of 32-bit lanes. CT: the conversions are straight-line. */
DHP_CT lanes_f32 widen_half(dhp_ct_u32 bits, dhp_dtype dtype) {
  return dtype == DHP_FLOAT16 ? dhp_float16_to_float32(bits) : dhp_bfloat16_to_float32(bits);
}

/* CT: as widen_half. */
DHP_CT lanes_f32 widen(const void *from, dhp_dtype dtype) {
  if (dtype == DHP_FLOAT32) return load(from);
  lanes_u16 halves;
  memcpy(&halves, from, sizeof halves);
  return widen_half((dhp_ct_u32)DHP_WIDEN_U16(halves), dtype);
}

/* CT: as widen. */
DHP_CT void narrow(void *to, lanes_f32 x, dhp_dtype dtype) {
  x = dhp_ct_canonical(x);
  if (dtype == DHP_FLOAT32) {
    store(to, x);
  } else {
    const dhp_ct_u32 bits = dtype == DHP_FLOAT16 ? dhp_float32_to_float16(x) : dhp_float32_to_bfloat16(x);
    const lanes_u16 halves = __builtin_convertvector(bits, lanes_u16);
    memcpy(to, &halves, sizeof halves);
  }
}

/* Elements [d, d + LANES) of a row of D, zeros behind its end. CT: as widen; bounds are public. */
DHP_CT lanes_f32 read_vector(const char *row, int d, int head_dim, dhp_dtype dtype, dhp_cpu_scratch *scratch) {
  const size_t size = element_size(dtype);
  if (d + LANES <= head_dim) return widen(row + (size_t)d * size, dtype);
  memset(scratch->edge, 0, sizeof scratch->edge);
  memcpy(scratch->edge, row + (size_t)d * size, (size_t)(head_dim - d) * size);
  return widen(scratch->edge, dtype);
}

/* A row of D elements to float32, with zeros up to the next multiple of a vector. */
DHP_CT void read_row(float *to, const char *row, int head_dim, dhp_dtype dtype, dhp_cpu_scratch *scratch) {
  for (int d = 0; d < head_dim; d += LANES)
    store(to + d, read_vector(row, d, head_dim, dtype, scratch));
}

/* A row of D elements from float32, times a factor. */
DHP_CT void write_elements(char *row, const float *from, lanes_f32 factor, int head_dim, dhp_dtype dtype,
                           dhp_cpu_scratch *scratch) {
  const size_t size = element_size(dtype);
  int d = 0;
  for (; d + LANES <= head_dim; d += LANES)
    narrow(row + (size_t)d * size, load(from + d) * factor, dtype);
  if (d < head_dim) {
    narrow(scratch->edge, load(from + d) * factor, dtype);
    memcpy(row + (size_t)d * size, scratch->edge, (size_t)(head_dim - d) * size);
  }
}

/* The choice of dtype gives each its own loop. */
static void write_row(char *row, const float *from, float factor, const dhp_tensor *t, dhp_cpu_scratch *scratch) {
  const int head_dim = (int)t->size[3];
  const lanes_f32 factors = dhp_ct_splat(factor);
  if (t->dtype == DHP_FLOAT32)
    write_elements(row, from, factors, head_dim, DHP_FLOAT32, scratch);
  else if (t->dtype == DHP_FLOAT16)
    write_elements(row, from, factors, head_dim, DHP_FLOAT16, scratch);
  else
    write_elements(row, from, factors, head_dim, DHP_BFLOAT16, scratch);
}

/* n rows of zeros. */
static void clear_rows(float (*rows)[DHP_CPU_PITCH_D], int n, int width) {
  for (int i = 0; i < n; i++)
    for (int d = 0; d < width; d += LANES)
      store(rows[i] + d, dhp_ct_splat(0.f));
}

enum { AHEAD = 16 }; /* rows: one is asked for so long before it is used that it comes from memory in time */

/* Asks for the cache lines of a row; reads nothing, and so may reach behind a tensor. 64: bytes of a line. */
DHP_CT void prefetch(const char *from, int size) {
  for (int i = 0; i < size; i += 64)
    __builtin_prefetch(from + i);
}

/* n rows from row s on, as [n][DHP_CPU_PITCH_D]. The choice of dtype gives each its own loop. */
static void read_rows(float (*to)[DHP_CPU_PITCH_D], const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int n,
                      dhp_cpu_scratch *scratch) {
  const int head_dim = (int)t->size[3], element = (int)element_size(t->dtype);
  for (int i = 0; i < n; i++) {
    const char *const row = row_pointer(t, b, h, s + i);
    prefetch(row + AHEAD * t->stride[2] * element, head_dim * element);
    if (t->dtype == DHP_FLOAT32)
      read_row(to[i], row, head_dim, DHP_FLOAT32, scratch);
    else if (t->dtype == DHP_FLOAT16)
      read_row(to[i], row, head_dim, DHP_FLOAT16, scratch);
    else
      read_row(to[i], row, head_dim, DHP_BFLOAT16, scratch);
  }
}

/* Key or value i of a key head, wherever it lies. CT: pages are public. */
static const char *key_row(const dhp_tensor *t, const dhp_cpu_rows *rows, int64_t h, int64_t i) {
  const int32_t *const pages = rows->places->pages;
  return pages ? row_pointer(t, pages[i / t->size[2]], h, i % t->size[2]) : row_pointer(t, rows->batch, h, i);
}

/*
 * Where the row is that lies AHEAD of key or value i, at `row`: in pages it may be anywhere, and behind key `last`
 * nowhere, which row itself stands for. CT: pages are public.
 */
static const char *row_ahead(const char *row, const dhp_tensor *t, const dhp_cpu_rows *rows, int64_t h, int64_t i,
                             int64_t last) {
  if (!rows->places->pages) return row + AHEAD * t->stride[2] * (int64_t)element_size(t->dtype);
  return i + AHEAD <= last ? key_row(t, rows, h, i + AHEAD) : row;
}

/* The same of keys or values `start` to `start` + n of a key head, wherever they lie. CT: pages are public. */
static void read_keys(float (*to)[DHP_CPU_PITCH_D], const dhp_tensor *t, const dhp_cpu_rows *rows, int64_t h,
                      int64_t start, int n, dhp_cpu_scratch *scratch) {
  if (!rows->places->pages) {
    read_rows(to, t, rows->batch, h, start, n, scratch);
    return;
  }
  const int64_t page_size = t->size[2];
  for (int i = 0, count = 0; i < n; i += count) {
    const int64_t row = (start + i) % page_size, left = page_size - row;
    count = n - i < left ? n - i : (int)left;
    read_rows(to + i, t, rows->places->pages[(start + i) / page_size], h, row, count, scratch);
  }
}

/* What q is multiplied with, so that 2^score is wanted: e^x = 2^(x log2(e)); or, to be capped, tanh of the score. */
static float factor_of(const dhp_attention *args) {
  const double scale = (double)(float)args->scale, log2_e = 1.4426950408889634;
  return (float)(args->softcap > 0. ? scale / args->softcap : scale * log2_e);
}

/* What tanh is multiplied with, so that 2^score is wanted; 0 without a soft cap. */
static float cap2_of(const dhp_attention *args) { return (float)(args->softcap * 1.4426950408889634); }

/* n rows from row s on times a public factor, transposed: [d][DHP_CPU_PITCH_Q]; lanes without a row hold zeros. */
static void read_lanes(float (*to)[DHP_CPU_PITCH_Q], const dhp_tensor *t, int64_t b, int64_t h, int64_t s, int n,
                       float factor, dhp_cpu_scratch *scratch) {
  const int head_dim = (int)t->size[3], lanes = round_up(n, LANES);
  read_rows(scratch->partial, t, b, h, s, n, scratch);
  for (int d = 0; d < head_dim; d++) {
    store(to[d] + lanes - LANES, dhp_ct_splat(0.f)); /* lanes without a row are in the last vector */
    for (int i = 0; i < n; i++)
      to[d][i] = scratch->partial[i][d] * factor;
  }
}

#endif
