/*
 * params.h - what the host and the kernel of tiles agree on, and an entry of the list that it makes. All public: the
 * pointers lead to lengths and a page table, never to an element of a tensor.
 */
#ifndef DHP_TILES_PARAMS_H
#define DHP_TILES_PARAMS_H

#include <stdint.h>

#include "../../hopper/divisor.h"

enum {
  DHP_TILES_FAR = 1 << 30, /* further than any query is from any key: no bound */
  DHP_TILE_WORDS = 16      /* of an entry: less than a warp has lanes */
};

/*
 * One query tile of a list, the longest first. Rows, and keys that are not in pages, are counted in their tensor; tiles
 * in a sequence. A warp reads it a word a lane.
 */
typedef struct dhp_listed_tile {
  /* for its loads */
  int32_t keys, key_row; /* how many keys count; the first of them, or with pages where its row of the table begins */
  int32_t last_tile;     /* the key tile that is visited first */
  int32_t key_tiles;     /* to visit */
  /* for its rows */
  int32_t row, row_end;        /* query rows [row, row_end) */
  int32_t last_key, first_key; /* that query `row` may see: the next one's are one further */
  /* for its steps */
  int32_t masked;     /* so many need the mask, the first ones */
  int32_t plain_end;  /* and those from here on */
  int32_t is_bad;     /* 1: the lengths or the pages are none; its rows become NaN */
  int32_t is_of_none; /* 1: its rows belong to no sequence */
  /* of the list, the same in all entries; the first one is there if the count is 0, too */
  int32_t count; /* of query tiles */
  dhp_divisor by_count;
  int32_t unused; /* entries are 16-byte aligned */
} dhp_listed_tile;

typedef struct dhp_tiles_params {
  /* As dhp_varlen has them, in device memory; NULL where it says so. */
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_k, *leftpad_k, *page_table;
  dhp_listed_tile *list;           /* 16-byte aligned */
  int32_t entries;                 /* that it has room for, no fewer than there are query tiles */
  int32_t sequences;               /* at most INT32_MAX - 1 */
  int32_t tokens_q, tokens_k;      /* rows of q; of k, if it has no pages */
  int32_t most_q, most_k;          /* max_seqlen_q, max_seqlen_k */
  int32_t pages, page_keys, width; /* how many there are, of how many keys; entries of a sequence */
  int32_t room;                    /* keys that the entries of a sequence have room for */
  int32_t rows, tile_k;            /* of a query tile, and keys of a key tile */
  int32_t is_bottom_right;
  int32_t left, right; /* query i sees keys from i - left to i + right, counted from its diagonal; DHP_TILES_FAR: all */
  int32_t most_tiles;  /* that a query tile visits, because of the window; DHP_TILES_FAR: no bound */
  dhp_divisor by_rows, by_tile_k, by_page_keys;
} dhp_tiles_params;

/* No shared memory; a macro of all families has these parameters. */
#define DHP_TILES_SHARED_BYTES(head_dim, tile_k, warpgroups, rows, stages) 0

#endif
