/* launch.h - the list of query tiles of packed sequences, made on the device. */
#ifndef DHP_TILES_LAUNCH_H
#define DHP_TILES_LAUNCH_H

#include "../../cuda/session.h"
#include "../../dhp_fa.h"

/* Query tiles of so many rows that packed sequences have at most: what a list has room for. */
int64_t dhp_tiles_entries(const dhp_varlen *args, int64_t rows);

/* Writes the list, dhp_tiles_entries times dhp_listed_tile, for query tiles of so many rows and key tiles of tile_k
 * keys. */
dhp_status dhp_tiles_launch(const dhp_session *session, const dhp_varlen *args, int64_t rows, int tile_k, void *list,
                            void *stream, dhp_error *error);

#endif
