/* workspace.c - see workspace.h. */
#include "workspace.h"

#include "../../error.h"
#include "../../kernels/kernel_table.h"
#include "../bounds/launch.h"
#include "../delta/launch.h"
#include "../dq_out/launch.h"
#include "part.h"

/* The kernels of this family. */
extern const dhp_family dhp_family_backward;

enum { BOUNDARY = 128 }; /* bytes: a line of the L2 cache; TMA needs 16 */

int dhp_backward_is_one_pass(const dhp_backward *args) {
  const dhp_tensor *const q = &args->forward.q;
  return args->dq.data && q->size[0] * q->size[1] * q->size[2] > 0 && args->forward.k.size[2] > 0 &&
         dhp_bounds_kernel(args) && dhp_dq_out_kernel(args) &&
         dhp_family_kernel(&dhp_family_backward, q->dtype, q->size[3], "dq dk dv");
}

/* The next place of so many bytes; NULL if there is no workspace yet. */
static void *place(const dhp_backward *args, size_t *used, int64_t bytes) {
  char *const here = args->workspace ? (char *)args->workspace + *used : NULL;
  *used += (size_t)(bytes + BOUNDARY - 1) / BOUNDARY * BOUNDARY;
  return here;
}

dhp_backward_places dhp_backward_places_of(const dhp_backward *args) {
  const int64_t *const q = args->forward.q.size, *const k = args->forward.k.size;
  const int64_t heads = q[0] * q[1], key_heads = k[0] * k[1], word = sizeof(float);
  dhp_backward_places p = {0};
  p.statistics = place(args, &p.bytes, heads * dhp_delta_pairs(args) * 4 * word);
  if (!dhp_backward_is_one_pass(args)) return p;
  const dhp_kernel_info *const bounds = dhp_bounds_kernel(args);
  p.failed = place(args, &p.bytes, key_heads * word);
  p.sums = place(args, &p.bytes, dhp_dq_out_integers(args, dhp_dq_out_kernel(args)) * word);
  p.units = place(args, &p.bytes, (heads * q[2] + 3) / 4 * 4); /* whole words: bits are set in words */
  const int64_t key_tiles = key_heads * dhp_bounds_tiles(args, bounds);
  p.bounds = place(args, &p.bytes, key_tiles * bounds->rows * 2 * word);
  p.columns = place(args, &p.bytes, key_tiles * (bounds->head_dim / 32) * word);
  return p;
}

dhp_status dhp_backward_offsets_of(const dhp_backward *args, dhp_backward_offsets *offsets, dhp_error *error) {
  if (!args->workspace) return dhp_fail(error, DHP_INVALID_ARGUMENT, "workspace: NULL; its places are asked for");
  if (!dhp_backward_is_one_pass(args))
    return dhp_fail(error, DHP_UNSUPPORTED, "q: no kernel of this build computes its gradients in one pass");
  const dhp_backward_places places = dhp_backward_places_of(args);
  const char *const workspace = args->workspace;
  *offsets = (dhp_backward_offsets){
      .statistics = (const char *)places.statistics - workspace,
      .failed = (const char *)places.failed - workspace,
      .sums = (const char *)places.sums - workspace,
      .units = (const char *)places.units - workspace,
      .bounds = (const char *)places.bounds - workspace,
      .columns = (const char *)places.columns - workspace,
  };
  return DHP_OK;
}
