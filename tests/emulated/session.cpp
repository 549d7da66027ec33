/*
 * session.cpp - stands in for csrc/cuda/session.c and tensor_map.c: a launch runs the kernel on the emulated machine,
 * and is over when it returns. Tensors lie in host memory.
 */
#include "machine.h"

#include <string.h>

extern "C" {
#define _Alignas alignas
#include "../../csrc/cuda/session.h"
#include "../../csrc/error.h"
#include "../../csrc/kernels/kernel_table.h"

dhp_status dhp_session_begin(dhp_session *session, int, dhp_error *) {
  *session = {};
  return DHP_OK;
}

void dhp_session_end(const dhp_session *) {}

static dhp_status encode(dhp_tensor_map *map, const dhp_tensor *tensor, int64_t length, int columns, int rows,
                         int heads) {
  emulated::TensorMap described = {};
  described.data = static_cast<const char *>(tensor->data);
  for (int d = 0; d < 4; d++) {
    described.size[d] = tensor->size[3 - d];
    described.stride_bytes[d] = 2 * tensor->stride[3 - d];
  }
  described.size[1] = length;
  described.box_columns = columns;
  described.box_rows = rows;
  described.box_heads = heads;
  described.element_bytes = 2;
  described.is_swizzled = true;
  static_assert(sizeof described <= sizeof *map, "a tensor map holds it");
  memcpy(map, &described, sizeof described);
  return DHP_OK;
}

dhp_status dhp_tensor_map_encode(const dhp_session *, dhp_tensor_map *map, const dhp_tensor *tensor, int64_t length,
                                 int rows, int heads, dhp_error *) {
  return encode(map, tensor, length, 64, rows, heads);
}

dhp_status dhp_tensor_map_encode_strips(const dhp_session *, dhp_tensor_map *map, const dhp_tensor *tensor,
                                        int64_t length, int columns, int rows, dhp_error *) {
  return encode(map, tensor, length, columns, rows, 1);
}

dhp_status dhp_tensor_map_encode_floats(const dhp_session *, dhp_tensor_map *map, const float *data, int64_t rows,
                                        int64_t columns, int box_columns, dhp_error *) {
  emulated::TensorMap described = {};
  described.data = reinterpret_cast<const char *>(data);
  const int64_t size[] = {columns, rows, 1, 1}, strides[] = {4, 4 * columns, 0, 0};
  memcpy(described.size, size, sizeof size);
  memcpy(described.stride_bytes, strides, sizeof strides);
  described.box_columns = box_columns;
  described.box_rows = described.box_heads = 1;
  described.element_bytes = 4;
  memcpy(map, &described, sizeof described);
  return DHP_OK;
}

void emulated_disturb(unsigned seed, int lost_load) { emulated::disturb(seed, lost_load); }

dhp_status dhp_session_launch(const dhp_session *, const dhp_kernel_info *kernel, int64_t grid, void **arguments, int,
                              void *, dhp_error *error) {
  const char *const wrong = emulated::launch(kernel->name, grid, kernel->threads, arguments);
  return wrong ? dhp_fail(error, DHP_DRIVER_ERROR, "%s: %s", kernel->name, wrong) : DHP_OK;
}

/* The CPU's kernels have no part in this. */
static dhp_status no_cpu(dhp_error *error) { return dhp_fail(error, DHP_UNSUPPORTED, "q: not emulated on CPU"); }
dhp_status dhp_cpu_forward(const dhp_attention *, const dhp_executor *, dhp_error *error) { return no_cpu(error); }
dhp_status dhp_cpu_backward(const dhp_backward *, const dhp_executor *, dhp_error *error) { return no_cpu(error); }
dhp_status dhp_cpu_sinks_backward(const dhp_sinks_backward *, const dhp_executor *, dhp_error *error) {
  return no_cpu(error);
}
dhp_status dhp_cpu_varlen(const dhp_varlen *, const dhp_executor *, dhp_error *error) { return no_cpu(error); }
dhp_status dhp_cpu_varlen_backward(const dhp_varlen_backward *, const dhp_executor *, dhp_error *error) {
  return no_cpu(error);
}
}
