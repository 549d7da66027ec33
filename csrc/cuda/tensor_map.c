/* tensor_map.c - describes a tensor to TMA (CUDA driver API, cuTensorMapEncodeTiled). */
#include "driver.h"
#include "session.h"

_Static_assert(sizeof(dhp_tensor_map) == sizeof(CUtensorMap) && _Alignof(dhp_tensor_map) >= _Alignof(CUtensorMap),
               "dhp_tensor_map stands for CUtensorMap");

enum {
  RANK = 4,
  ELEMENT_BYTES = 2,
  BOX_COLUMNS = 64 /* of 16 bits: the 128 bytes of the swizzle */
};

/* That is as wide as a row of the box. */
static CUtensorMapSwizzle swizzle_of(int columns) {
  return columns == 16   ? CU_TENSOR_MAP_SWIZZLE_32B
         : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_128B;
}

static dhp_status encode(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor, int64_t length,
                         int columns, int rows, int heads, dhp_error *error) {
  const dhp_driver *const driver = session->driver;
  cuuint64_t sizes[RANK], strides[RANK - 1]; /* innermost first; the innermost stride is the element */
  for (int i = 0; i < RANK; i++)
    sizes[i] = (cuuint64_t)tensor->size[RANK - 1 - i];
  sizes[1] = (cuuint64_t)length;
  for (int i = 0; i < RANK - 1; i++) {
    const int dim = RANK - 2 - i;
    /* a stride that is never taken may be anything; TMA wants a multiple of 16 bytes */
    strides[i] = tensor->size[dim] > 1 ? (cuuint64_t)tensor->stride[dim] * ELEMENT_BYTES : 16;
  }
  const cuuint32_t box[RANK] = {(cuuint32_t)columns, (cuuint32_t)rows, (cuuint32_t)heads, 1};
  const cuuint32_t element_strides[RANK] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      tensor->dtype == DHP_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = driver->cuTensorMapEncodeTiled(
      (CUtensorMap *)map, type, RANK, tensor->data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle_of(columns), CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return dhp_driver_check(driver, result, "cuTensorMapEncodeTiled", error);
}

dhp_status dhp_tensor_map_encode(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor,
                                 int64_t length, int rows, int heads, dhp_error *error) {
  return encode(session, map, tensor, length, BOX_COLUMNS, rows, heads, error);
}

dhp_status dhp_tensor_map_encode_strips(const dhp_session *session, dhp_tensor_map *map, const dhp_tensor *tensor,
                                        int64_t length, int columns, int rows, dhp_error *error) {
  return encode(session, map, tensor, length, columns, rows, 1, error);
}

dhp_status dhp_tensor_map_encode_floats(const dhp_session *session, dhp_tensor_map *map, const float *data,
                                        int64_t rows, int64_t columns, int box_columns, dhp_error *error) {
  const dhp_driver *const driver = session->driver;
  const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[] = {(cuuint64_t)columns * sizeof(float)};
  const cuuint32_t box[] = {(cuuint32_t)box_columns, 1}, element_strides[] = {1, 1};
  const CUresult result = driver->cuTensorMapEncodeTiled(
      (CUtensorMap *)map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, (void *)data, sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return dhp_driver_check(driver, result, "cuTensorMapEncodeTiled", error);
}
