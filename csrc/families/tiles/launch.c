/* launch.c - see launch.h. CT: reads shapes, flags and pointers only. */
#include "launch.h"

#include "../../hopper/chip.h"
#include "../../kernels/kernel_table.h"
#include "../../mask.h"
#include "params.h"

/* Its one kernel. */
extern const dhp_family dhp_family_tiles;

int64_t dhp_tiles_entries(const dhp_varlen *args, int64_t rows) {
  return args->packed.q.size[2] / rows + args->sequences +
         1; /* one that is cut off for each sequence, and behind them */
}

static int32_t at_most(int64_t x, int32_t most) { return x < most ? (int32_t)x : most; }

static void set_window(const dhp_attention *packed, dhp_tiles_params *params) {
  const dhp_mask mask = dhp_mask_along(packed, DHP_TILES_FAR, DHP_TILES_FAR, 0);
  params->left = (int32_t)-mask.lowest;
  params->right = (int32_t)mask.highest;
  params->most_tiles = DHP_TILES_FAR;
  if (params->left == DHP_TILES_FAR || params->right == DHP_TILES_FAR) return;
  const int64_t seen = (int64_t)params->rows + params->left + params->right;
  params->most_tiles = at_most(seen / params->tile_k + 2, DHP_TILES_FAR);
}

dhp_status dhp_tiles_launch(const dhp_session *session, const dhp_varlen *args, int64_t rows, int tile_k, void *list,
                            void *stream, dhp_error *error) {
  const dhp_attention *const packed = &args->packed;
  const int is_paged = args->page_table != NULL;
  const int64_t page_keys = is_paged ? packed->k.size[2] : 1, most = INT32_MAX;
  dhp_tiles_params params = {
      .cu_seqlens_q = args->cu_seqlens_q,
      .cu_seqlens_k = args->cu_seqlens_k,
      /* without a sequence there is no first number of these, either */
      .seqused_k = args->sequences ? args->seqused_k : NULL,
      .leftpad_k = args->sequences ? args->leftpad_k : NULL,
      .page_table = args->page_table,
      .list = list,
      .entries = (int32_t)dhp_tiles_entries(args, rows),
      .sequences = (int32_t)args->sequences,
      .tokens_q = (int32_t)packed->q.size[2],
      .tokens_k = is_paged ? 0 : (int32_t)packed->k.size[2],
      .most_q = at_most(args->max_seqlen_q, most),
      .most_k = at_most(args->max_seqlen_k, most),
      .pages = is_paged ? at_most(packed->k.size[0], most) : 0,
      .page_keys = (int32_t)page_keys,
      .width = is_paged ? (int32_t)args->page_table_width : 0,
      .room = is_paged ? at_most(args->page_table_width * page_keys, DHP_TILES_FAR) : 0,
      .rows = (int32_t)rows,
      .tile_k = tile_k,
      .is_bottom_right = args->is_bottom_right != 0,
      .by_rows = dhp_divisor_of(rows),
      .by_tile_k = dhp_divisor_of(tile_k),
      .by_page_keys = dhp_divisor_of(page_keys),
  };
  set_window(packed, &params);
  const dhp_kernel_info *const kernel = dhp_family_tiles.kernels;
  void *arguments[] = {&params};
  const int64_t grid = (params.entries + kernel->rows - 1) / kernel->rows;
  return dhp_session_launch(session, kernel, grid, arguments, grid <= DHP_MULTIPROCESSORS, stream, error);
}
