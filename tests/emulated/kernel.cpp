/* kernel.cpp - a kernel, with the constants of one choice, as a function of a launch's arguments. */
#include <cuda.h> /* keywords, which nvcc knows without it */

#include KERNEL_SOURCE

#if OF_FORWARD
char shared[1]; /* never touched: addresses are numbers here */

static void of_arguments(void **arguments) {
  const CUtensorMap *const *const maps = reinterpret_cast<const CUtensorMap *const *>(arguments);
  const dhp_fwd_params &params = *static_cast<const dhp_fwd_params *>(arguments[3]);
#if LISTED
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params, *static_cast<const dhp_fwd_list *>(arguments[4]));
#else
  dhp_attention_fwd(*maps[0], *maps[1], *maps[2], params);
#endif
}
#elif OF_TILES
static void of_arguments(void **arguments) {
  dhp_attention_tiles(*static_cast<const dhp_tiles_params *>(arguments[0]));
}
#endif

static const emulated::Launchable launchable(KERNEL_NAME, of_arguments);
