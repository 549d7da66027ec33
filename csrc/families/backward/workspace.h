/* workspace.h - what lies where in the workspace of a backward on a GPU. */
#ifndef DHP_BACKWARD_WORKSPACE_H
#define DHP_BACKWARD_WORKSPACE_H

#include "../../dhp_fa.h"

/* 1 if one kernel computes dq and dk, dv together, by sums in the workspace. */
int dhp_backward_is_one_pass(const dhp_backward *args);

/* Places in args->workspace, each on a boundary of 128 bytes; what is not needed is NULL. bytes: of all. */
typedef struct dhp_backward_places {
  float *statistics; /* [batch heads][pairs of query rows][4]: see ../delta/params.h */
  float *failed;     /* [batch key heads] */
  int32_t *sums;     /* of dq, see ../dq_out/params.h */
  uint8_t *units;    /* [batch heads][query rows]: see ../delta/params.h */
  float *bounds;     /* [batch key heads][tiles of keys][rows of a tile][2]: see ../bounds/params.h */
  uint32_t *columns; /* [batch key heads][tiles of keys][head_dim / 32] */
  size_t bytes;
} dhp_backward_places;

dhp_backward_places dhp_backward_places_of(const dhp_backward *args);

#endif
