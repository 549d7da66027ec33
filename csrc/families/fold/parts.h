/*
 * parts.h - parts of rows in a workspace: of each its O as float32, as wide as the kernel's head_dim, then of all of
 * them shift and sum. They are as secret as the output.
 */
#ifndef DHP_FOLD_PARTS_H
#define DHP_FOLD_PARTS_H

#include <stddef.h>
#include <stdint.h>

typedef struct dhp_parts {
  float *out;  /* [parts, head_dim] */
  float *sums; /* [parts, 2]; both NULL without parts */
} dhp_parts;

static inline size_t dhp_parts_bytes(int64_t parts, int head_dim) {
  return (size_t)parts * ((size_t)head_dim + 2) * sizeof(float);
}

static inline dhp_parts dhp_parts_at(void *workspace, int64_t parts, int head_dim) {
  float *const out = parts > 0 ? workspace : NULL;
  return (dhp_parts){out, out ? out + parts * head_dim : NULL};
}

#endif
