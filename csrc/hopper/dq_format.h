/* dq_format.h - how dq lies in memory before it is dq, which families delta, backward and dq_out agree on. */
#ifndef DHP_DQ_FORMAT_H
#define DHP_DQ_FORMAT_H

/* Sums come in blocks: what a warp holds of a product's accumulator (PTX ISA 9.0, 9.7.15.5.1.1, matrix D). */
enum { DQ_BLOCK_ROWS = 16, DQ_BLOCK_COLUMNS = 64 };

/* The unit of a row's sums is a power of two, written as the biased exponent of a float, a byte. */
enum {
  NAN_UNIT = 255, /* the row is NaN; all bits are set */
  ONE_UNIT = 127
};

#endif
