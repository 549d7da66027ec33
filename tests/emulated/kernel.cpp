/* kernel.cpp - a kernel, with the constants of one choice, as a function of a launch's arguments. */
#include <cuda.h> /* keywords, which nvcc knows without it */

#include KERNEL_SOURCE

/* Never touched: addresses are numbers here. Of all kernels of a library. */
__attribute__((weak)) char shared[1];

#if OF_FORWARD

static void of_arguments(void **arguments) {
  const CUtensorMap *const *const maps = reinterpret_cast<const CUtensorMap *const *>(arguments);
  const dhp_fwd_params &params = *static_cast<const dhp_fwd_params *>(arguments[3]);
#if FORM
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params, *static_cast<const dhp_fwd_list *>(arguments[4]),
                    *static_cast<const dhp_fwd_forms *>(arguments[5]));
#elif LISTED
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params, *static_cast<const dhp_fwd_list *>(arguments[4]));
#elif WINDOWED
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params, *static_cast<const dhp_fwd_window *>(arguments[4]));
#else
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params);
#endif
}
#elif OF_DECODE
static void of_arguments(void **arguments) {
  const CUtensorMap *const *const maps = reinterpret_cast<const CUtensorMap *const *>(arguments);
  dhp_attention_decode(*maps[0], *maps[1], *static_cast<const dhp_decode_params *>(arguments[2]));
}
#elif OF_FOLD
static void of_arguments(void **arguments) { dhp_attention_fold(*static_cast<const dhp_fold_params *>(arguments[0])); }
#elif OF_TILES
static void of_arguments(void **arguments) {
  dhp_attention_tiles(*static_cast<const dhp_tiles_params *>(arguments[0]));
}
#elif OF_BACKWARD
static void of_arguments(void **arguments) {
  const CUtensorMap *const *const maps = reinterpret_cast<const CUtensorMap *const *>(arguments);
  dhp_attention_bwd(*maps[0], *maps[1], *maps[2], *maps[3], *maps[4],
                    *static_cast<const dhp_bwd_params *>(arguments[5]));
}
#elif OF_BOUNDS
float2 up_to[2 * ROWS]; /* of the one CTA that runs; the columns behind take less */

static void of_arguments(void **arguments) {
  dhp_attention_bounds(*static_cast<const dhp_bounds_params *>(arguments[0]));
}
#elif OF_DELTA
static void of_arguments(void **arguments) {
  dhp_attention_delta(*static_cast<const dhp_delta_params *>(arguments[0]));
}
#elif OF_DQ_OUT
static void of_arguments(void **arguments) {
  dhp_attention_dq_out(*static_cast<const dhp_dq_out_params *>(arguments[0]));
}
#endif

#if OF_DECODE
enum { CTAS_OF_CLUSTER = CLUSTER };
#else
enum { CTAS_OF_CLUSTER = 1 };
#endif
static const emulated::Launchable launchable(KERNEL_NAME, CTAS_OF_CLUSTER, of_arguments);
