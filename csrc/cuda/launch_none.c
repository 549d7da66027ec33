/* launch_none.c - stands in for launch.c and driver.c in a build without the CUDA toolkit. */
#include "../error.h"
#include "launch.h"

dhp_status dhp_cuda_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                           dhp_error *error) {
  (void)args, (void)plan, (void)device, (void)stream;
  return dhp_fail(error, DHP_NO_GPU, "this build has no GPU kernels: nvcc was not found when it was built");
}
