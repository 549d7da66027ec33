/* kernel.cpp - a kernel, with the constants of one choice, as a function of a launch's arguments. */
#include <cuda.h> /* keywords, which nvcc knows without it */

#include KERNEL_SOURCE

#if OF_FORWARD
char shared[1]; /* never touched: addresses are numbers here */

static void of_arguments(void **arguments) {
  const CUtensorMap *const *const maps = reinterpret_cast<const CUtensorMap *const *>(arguments);
  const dhp_fwd_params &params = *static_cast<const dhp_fwd_params *>(arguments[3]);
#if FORM
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params, *static_cast<const dhp_fwd_list *>(arguments[4]),
                    *static_cast<const dhp_fwd_forms *>(arguments[5]));
#elif LISTED
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params, *static_cast<const dhp_fwd_list *>(arguments[4]));
#else
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params);
#endif
}
#elif OF_DECODE
char shared[1];

/* What the host's code never asks for: a launch over some of the key tiles, and parts before the division. */
static struct {
  int32_t first_tile, end_tile;
  float *out, *top, *sum;
} parts;
extern "C" void emulated_parts(int32_t first_tile, int32_t end_tile, float *out, float *top, float *sum) {
  parts = {first_tile, end_tile, out, top, sum};
}

static void of_arguments(void **arguments) {
  const CUtensorMap *const *const maps = reinterpret_cast<const CUtensorMap *const *>(arguments);
  dhp_decode_params params = *static_cast<const dhp_decode_params *>(arguments[2]);
  if (parts.out) {
    params.first_tile = parts.first_tile;
    params.end_tile = parts.end_tile;
    params.part_out = parts.out;
    params.part_top = parts.top;
    params.part_sum = parts.sum;
  }
  dhp_attention_decode(*maps[0], *maps[1], params);
}
#elif OF_TILES
static void of_arguments(void **arguments) {
  dhp_attention_tiles(*static_cast<const dhp_tiles_params *>(arguments[0]));
}
#endif

#if OF_DECODE
enum { CTAS_OF_CLUSTER = CLUSTER };
#else
enum { CTAS_OF_CLUSTER = 1 };
#endif
static const emulated::Launchable launchable(KERNEL_NAME, CTAS_OF_CLUSTER, of_arguments);
