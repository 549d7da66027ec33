/* packed.c - see packed.h. */
#include "packed.h"

#include <float.h>
#include <limits.h>
#include <string.h>

#include "../../check.h"
#include "../../error.h"
#include "../../hopper/chip.h"
#include "../../hopper/log2.h"
#include "../../hopper/softmax_scale.h"
#include "../../kernels/kernel_table.h"
#include "../../mask.h"
#include "../fold/parts.h"
#include "../tiles/launch.h"
#include "launch.h"
#include "params.h"

extern const dhp_family dhp_family_forward;

enum {
  LEAST_PAGE = 16,
  ROW_BYTES = 128, /* of a box in shared memory */
  FEW_ROUNDS = 5,
  LEAST_ROUNDS = 2 /* of a section */
};

/* What kernels compute, by what a call asks for beside plain attention: the parts of family.py. */
static const char *part_of(const dhp_attention *packed) {
  return packed->softcap != 0. ? "packed out softcap" : packed->sinks ? "packed out sinks" : "packed out";
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/*
 * Whether rows are folds over segments. Within a window that is no wider than a segment a row is one chain, wherever
 * the window begins: else it would be a fold or not by its position, and slower where it is.
 */
static int has_segments(const dhp_varlen *args, const dhp_kernel_info *kernel) {
  const int64_t most = (int64_t)kernel->segment_tiles * kernel->tile_k;
  return args->max_seqlen_k > most && !dhp_window_is_within(&args->packed, most);
}

/* Heads of one key head share a tile while the rows of the longest sequence fit. */
static dhp_packed_plan plan_with(const dhp_varlen *args, const dhp_kernel_info *kernel) {
  const int64_t *const q = args->packed.q.size;
  const int64_t heads_per_key_head = q[1] / args->packed.k.size[1];
  dhp_packed_plan plan = {.kernel = kernel, .heads_per_tile = 1};
  while (heads_per_key_head % (2 * plan.heads_per_tile) == 0 &&
         2 * plan.heads_per_tile * args->max_seqlen_q <= kernel->rows)
    plan.heads_per_tile *= 2;
  plan.rows = kernel->tile_q / plan.heads_per_tile;
  plan.entries = dhp_tiles_entries(args, plan.rows);
  plan.items = plan.entries * (q[1] / plan.heads_per_tile);
  const int64_t at_a_time = (int64_t)DHP_MULTIPROCESSORS * kernel->ctas_per_sm;
  plan.grid = plan.items < at_a_time ? plan.items : at_a_time;
  plan.parts = has_segments(args, kernel) ? plan.grid * kernel->tile_q : 0;
  return plan;
}

/* Rounds of tiles times the cycles of a step, if every sequence were as long as the others. */
static double cost_of(const dhp_varlen *args, const dhp_packed_plan *plan) {
  const int64_t tokens = args->packed.q.size[2], sequences = args->sequences > 0 ? args->sequences : 1;
  const int64_t tiles = ceil_div(ceil_div(tokens, sequences), plan->rows) * sequences;
  const int64_t items = tiles * (args->packed.q.size[1] / plan->heads_per_tile);
  return (double)ceil_div(items, (int64_t)DHP_MULTIPROCESSORS * plan->kernel->ctas_per_sm) * plan->kernel->step_cycles;
}

static dhp_status check_sizes(const dhp_varlen *args, dhp_error *error) {
  const int64_t n = args->sequences;
  if (n > INT_MAX / 2)
    return dhp_fail(error, DHP_UNSUPPORTED, "cu_seqlens_q: %lld sequences; supported on CUDA: up to %d", (long long)n,
                    INT_MAX / 2);
  if (args->page_table && n > 0 && args->page_table_width > INT_MAX / n)
    return dhp_fail(error, DHP_UNSUPPORTED, "page_table: [%lld, %lld]; supported on CUDA: up to %d entries",
                    (long long)n, (long long)args->page_table_width, INT_MAX);
  return DHP_OK;
}

dhp_status dhp_plan_packed(const dhp_varlen *args, dhp_packed_plan *plan, dhp_error *error) {
  const dhp_attention *const packed = &args->packed;
  const int64_t *const q = packed->q.size;
  *plan = (dhp_packed_plan){0};
  if (packed->q.dtype != DHP_FLOAT16 && packed->q.dtype != DHP_BFLOAT16)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: dtype %s; supported on CUDA: float16, bfloat16",
                    dhp_dtype_name(packed->q.dtype));
  dhp_status status = dhp_check_cuda_widths(packed, error);
  if (status == DHP_OK) status = check_sizes(args, error);
  if (status != DHP_OK) return status;
  if (dhp_family_forward.count == 0)
    return dhp_fail(error, DHP_NO_GPU, "this build has no GPU kernels: nvcc was not found when it was built");
  const dhp_kernel_info *const fitting = dhp_family_kernel(&dhp_family_forward, packed->q.dtype, q[3], part_of(packed));
  if (!fitting || q[3] % 8 != 0)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: head_dim %lld; supported on CUDA: a multiple of 8 up to %d",
                    (long long)q[3], dhp_cuda_max_head_dim());
  if (q[1] == 0 || q[2] == 0) return DHP_OK;
  double lowest = 0.;
  for (int i = 0; i < dhp_family_forward.count; i++) {
    const dhp_kernel_info *const kernel = &dhp_family_forward.kernels[i];
    if (kernel->dtype != packed->q.dtype || kernel->head_dim != fitting->head_dim ||
        strcmp(kernel->part, fitting->part) != 0)
      continue;
    const dhp_packed_plan with = plan_with(args, kernel);
    const double cost = cost_of(args, &with);
    if (plan->kernel && cost >= lowest) continue;
    *plan = with;
    lowest = cost;
  }
  if (plan->entries > DHP_CUDA_MAX_ITEMS || plan->items > DHP_CUDA_MAX_ITEMS)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: up to %lld tiles of %lld rows; supported on CUDA: up to %d",
                    (long long)plan->items, (long long)plan->rows, DHP_CUDA_MAX_ITEMS);
  return DHP_OK;
}

/* Keys of a piece: of a key tile, within a page. */
static int piece_of(const dhp_varlen *args, int tile_k) {
  if (!args->page_table) return tile_k;
  int piece = LEAST_PAGE;
  while (2 * piece <= args->packed.k.size[2] && tile_k % (2 * piece) == 0)
    piece *= 2;
  return piece;
}

static dhp_status encode_maps(const dhp_session *session, const dhp_varlen *args, const dhp_packed_plan *plan,
                              int piece, dhp_tensor_map maps[3], dhp_error *error) {
  const dhp_tensor *const q = &args->packed.q;
  /* without a single key nothing is read of k and v: any readable tensor serves */
  const int has_keys = args->packed.k.size[0] > 0 && args->packed.k.size[2] > 0;
  const dhp_tensor *const k = has_keys ? &args->packed.k : q, *const v = has_keys ? &args->packed.v : q;
  const int rows = plan->kernel->rows / plan->heads_per_tile; /* of one head, in a warpgroup */
  dhp_status status = dhp_tensor_map_encode(session, &maps[0], q, q->size[2], rows, plan->heads_per_tile, error);
  if (status == DHP_OK) status = dhp_tensor_map_encode(session, &maps[1], k, k->size[2], piece, 1, error);
  if (status == DHP_OK) status = dhp_tensor_map_encode(session, &maps[2], v, v->size[2], piece, 1, error);
  return status;
}

/* Of what the softmax is taken: capped scores are scaled already; and a sink has to be a score times it. */
static double scale_of(const dhp_attention *packed) {
  if (packed->softcap != 0.) return 1.;
  return packed->sinks && packed->scale < FLT_MIN ? FLT_MIN : packed->scale;
}

static dhp_fwd_forms forms_of(const dhp_attention *packed) {
  const double cap = packed->softcap, log2_e = 1.44269504088896341;
  const dhp_softmax_scale by = dhp_softmax_scale_of(scale_of(packed));
  return (dhp_fwd_forms){
      .sinks = packed->sinks,
      .has_sinks = packed->sinks != 0,
      .scores_of_log2 = 1.f / by.scale_log2,
      .cap = (float)cap,
      .exponent_of_score = cap != 0. ? (float)(2. * log2_e * packed->scale / cap) : 0.f,
  };
}

/*
 * Head groups of a section: those of one key head, or of as many as make two rounds; all, if there are few rounds. By
 * calculation these numbers keep CTAs 96 to 100 % busy over mixed lengths.
 */
static int section_of(const dhp_attention *packed, const dhp_packed_plan *plan) {
  const int64_t groups = packed->q.size[1] / plan->heads_per_tile, key_heads = packed->k.size[1];
  if (plan->items <= FEW_ROUNDS * plan->grid) return (int)groups;
  int64_t together = 1; /* key heads */
  while (together < key_heads &&
         (key_heads % together != 0 || plan->entries * (groups / key_heads) * together < LEAST_ROUNDS * plan->grid))
    together++;
  return (int)(groups / key_heads * together);
}

dhp_status dhp_packed_launch(const dhp_varlen *args, const dhp_packed_plan *plan, int device, void *stream,
                             dhp_error *error) {
  dhp_session session;
  dhp_status status = dhp_session_begin(&session, device, error);
  if (status != DHP_OK) return status;
  const dhp_attention *const packed = &args->packed;
  const int tile_k = plan->kernel->tile_k, piece = piece_of(args, tile_k);
  const int is_paged = args->page_table != NULL;
  const int has_entries = is_paged && args->sequences > 0 && args->page_table_width > 0;
  const int64_t page_keys = packed->k.size[2];
  dhp_tensor_map maps[3];
  status = encode_maps(&session, args, plan, piece, maps, error);
  if (status == DHP_OK) status = dhp_tiles_launch(&session, args, plan->rows, tile_k, args->workspace, stream, error);
  if (status == DHP_OK) {
    const dhp_fwd_forms forms = forms_of(packed);
    dhp_attention scaled = *packed;
    scaled.scale = scale_of(packed);
    dhp_fwd_params params = dhp_forward_params(&scaled, plan->kernel->rows / plan->heads_per_tile);
    const dhp_parts parts =
        dhp_parts_at((dhp_listed_tile *)args->workspace + plan->entries, plan->parts, plan->kernel->head_dim);
    params.part_out = parts.out;
    params.part_sums = parts.sums;
    params.head_groups = (int32_t)(packed->q.size[1] / plan->heads_per_tile);
    params.by_heads_per_key_head = dhp_divisor_of(params.heads_per_key_head);
    const int section = section_of(packed, plan);
    dhp_fwd_list list = {
        .list = args->workspace,
        .page_table = has_entries ? args->page_table : args->workspace,
        .pieces = tile_k / piece,
        .piece_keys = piece,
        .piece_bytes = piece * ROW_BYTES,
        .log2_page = is_paged ? dhp_log2_of(page_keys) : 0,
        .with_pages = is_paged,
        .row_in_page = is_paged ? (int32_t)page_keys - 1 : 0,
        .segment_of = plan->parts > 0 ? -plan->kernel->segment_tiles : 0, /* a power of two */
        .section = section,
        .by_section = dhp_divisor_of(section),
    };
    void *arguments[] = {&maps[0], &maps[1], &maps[2],
                         &params,  &list,    (void *)&forms}; /* the last of those with a FORM */
    const int may_overlap = plan->grid <= DHP_MULTIPROCESSORS;
    status = dhp_session_launch(&session, plan->kernel, plan->grid, arguments, may_overlap, stream, error);
  }
  dhp_session_end(&session);
  return status;
}
