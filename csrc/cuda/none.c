/* none.c - stands in for session.c, tensor_map.c and driver.c in a build without the CUDA toolkit. */
#include "../error.h"
#include "session.h"

static dhp_status fail(dhp_error *error) {
  return dhp_fail(error, DHP_NO_GPU, "this build has no GPU kernels: nvcc was not found when it was built");
}

dhp_status dhp_session_begin(dhp_session *session, int device, dhp_error *error) {
  (void)session, (void)device;
  return fail(error);
}

void dhp_session_end(const dhp_session *session) { (void)session; }

dhp_status dhp_tensor_map_encode(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor,
                                 int64_t length, int rows, int heads, dhp_error *error) {
  (void)session, (void)map, (void)tensor, (void)length, (void)rows, (void)heads;
  return fail(error);
}

dhp_status dhp_tensor_map_encode_strips(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor,
                                        int64_t length, int columns, int rows, dhp_error *error) {
  (void)session, (void)map, (void)tensor, (void)length, (void)columns, (void)rows;
  return fail(error);
}

dhp_status dhp_tensor_map_encode_floats(const dhp_session *session, dhp_tensor_map *map, const float *data,
                                        int64_t rows, int64_t columns, int box_columns, dhp_error *error) {
  (void)session, (void)map, (void)data, (void)rows, (void)columns, (void)box_columns;
  return fail(error);
}

dhp_status dhp_session_launch(const dhp_session *session, const dhp_kernel_info *kernel, int64_t grid, void **arguments,
                              int may_overlap, void *stream, dhp_error *error) {
  (void)session, (void)kernel, (void)grid, (void)arguments, (void)may_overlap, (void)stream;
  return fail(error);
}
