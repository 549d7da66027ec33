/* places.h - where rows lie that a call's sizes and strides do not tell: of a sequence among many. Public. */
#ifndef DHP_CPU_PLACES_H
#define DHP_CPU_PLACES_H

#include <stdint.h>

typedef struct dhp_cpu_places {
  int64_t lse_pitch;    /* rows of lse from a head to the next: Sq, or all tokens of a packed call */
  const int32_t *pages; /* which of the pages [page, Hk, row, D] of k and v hold its keys, in their order; NULL: k and v
                           hold them one behind the other */
} dhp_cpu_places;

#endif
