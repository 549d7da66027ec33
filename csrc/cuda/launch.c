/*
 * launch.c - loads a kernel once a device, describes the tensors to TMA, and enqueues the launch.
 */
#include "launch.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "../error.h"
#include "../kernels/attention_fwd.h"
#include "../kernels/kernel_table.h"
#include "../plan.h"
#include "../schedule.h"
#include "driver.h"

enum {
  MAX_DEVICES = 64, /* of one process */
  MAX_KERNELS = 64  /* shipped ones; checked against the table when a device is opened */
};

#define LOG2_E 1.44269504088896341

/* ---- what is loaded --------------------------------------------------------------------------------------------- */

typedef struct device_state {
  atomic_int opened; /* set last, so that readers need no lock */
  CUcontext context; /* the primary context, the one torch uses */
  _Atomic(CUfunction) functions[MAX_KERNELS];
} device_state;

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static device_state devices[MAX_DEVICES];

#define TRY(call)                                                                       \
  do {                                                                                  \
    const dhp_status try_status = dhp_driver_check(driver, driver->call, #call, error); \
    if (try_status != DHP_OK) return try_status;                                        \
  } while (0)

/* With load_lock held. */
static dhp_status open_device(const dhp_driver *driver, int index, dhp_error *error) {
  device_state *const state = &devices[index];
  if (atomic_load(&state->opened)) return DHP_OK;
  CUdevice device;
  int major = 0, minor = 0;
  TRY(cuDeviceGet(&device, index));
  TRY(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  TRY(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  if (major != 9 || minor != 0)
    return dhp_fail(error, DHP_NO_GPU,
                    "device %d has compute capability %d.%d; supported: 9.0 (Hopper: H100, H200, GH200)", index, major,
                    minor);
  if (dhp_kernel_table_size > MAX_KERNELS)
    return dhp_fail(error, DHP_UNSUPPORTED, "%d kernels built; launch.c has room for %d", dhp_kernel_table_size,
                    MAX_KERNELS);
  TRY(cuDevicePrimaryCtxRetain(&state->context, device));
  atomic_store(&state->opened, 1);
  return DHP_OK;
}

/* With load_lock held and the device's context current. */
static dhp_status load_kernel(const dhp_driver *driver, const dhp_kernel_info *kernel, _Atomic(CUfunction) *slot,
                              dhp_error *error) {
  if (atomic_load(slot)) return DHP_OK;
  CUmodule module;
  CUfunction function;
  TRY(cuModuleLoadData(&module, kernel->cubin));
  TRY(cuModuleGetFunction(&function, module, "dhp_attention_fwd"));
  TRY(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->shared_bytes));
  atomic_store(slot, function);
  return DHP_OK;
}

/* ---- what is launched ------------------------------------------------------------------------------------------- */

/*
 * The first `length` rows of each head in boxes of `rows` rows of `heads` heads, 64 columns wide; elements outside read
 * as zero.
 */
static dhp_status describe(const dhp_driver *driver, CUtensorMap *map, const dhp_tensor *t, int64_t length, int rows,
                           int heads, dhp_error *error) {
  enum { RANK = 4, ELEMENT_BYTES = 2 };
  cuuint64_t sizes[RANK], strides[RANK - 1]; /* innermost first; the innermost stride is the element */
  for (int i = 0; i < RANK; i++)
    sizes[i] = (cuuint64_t)t->size[RANK - 1 - i];
  sizes[1] = (cuuint64_t)length;
  for (int i = 0; i < RANK - 1; i++) {
    const int dim = RANK - 2 - i;
    /* a stride that is never taken may be anything; TMA wants a multiple of 16 bytes */
    strides[i] = t->size[dim] > 1 ? (cuuint64_t)t->stride[dim] * ELEMENT_BYTES : 16;
  }
  const cuuint32_t box[RANK] = {DHP_FWD_BOX, (cuuint32_t)rows, (cuuint32_t)heads, 1};
  const cuuint32_t element_strides[RANK] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      t->dtype == DHP_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  TRY(cuTensorMapEncodeTiled(map, type, RANK, t->data, sizes, strides, box, element_strides,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return DHP_OK;
}

static int log2_of(int power) {
  int log = 0;
  while (1 << log < power)
    log++;
  return log;
}

/* With the device's context current. */
static dhp_status enqueue(const dhp_driver *driver, CUfunction function, const dhp_attention *args,
                          const dhp_plan *plan, CUstream stream, dhp_error *error) {
  const dhp_kernel_info *const kernel = plan->kernel;
  /*
   * Keys that no query sees are cut off: TMA then reads zeros, and whatever they hold (a NaN in an unused part of a
   * cache) cannot meet a probability of 0. Without a single key the kernel still visits one tile, wholly masked: any
   * readable tensor serves as k and v.
   */
  const int64_t seqlen_q = args->q.size[2], seqlen_k = dhp_keys_seen(args);
  const dhp_tensor *const k = seqlen_k > 0 ? &args->k : &args->q, *const v = seqlen_k > 0 ? &args->v : &args->q;
  const int64_t length = seqlen_k > 0 ? seqlen_k : 1;
  const int rows = kernel->tile_q / kernel->warpgroups / plan->heads_per_tile;

  CUtensorMap q_map, k_map, v_map;
  dhp_status status = describe(driver, &q_map, &args->q, seqlen_q, rows, plan->heads_per_tile, error);
  if (status == DHP_OK) status = describe(driver, &k_map, k, length, kernel->tile_k, 1, error);
  if (status == DHP_OK) status = describe(driver, &v_map, v, length, kernel->tile_k, 1, error);
  if (status != DHP_OK) return status;

  /* not 0: a masked score is -inf, and -inf times 0 is NaN */
  const float scale_log2 = fmaxf((float)(args->scale * LOG2_E), FLT_MIN);
  int exponent;
  frexpf(scale_log2, &exponent); /* 2^(exponent - 1) <= scale_log2 < 2^exponent: the difference below is exact */
  dhp_fwd_params params = {
      .out = args->out.data,
      .out_stride = {args->out.stride[0], args->out.stride[1], args->out.stride[2]},
      .lse = args->lse,
      .batch = (int32_t)args->q.size[0],
      .heads = (int32_t)args->q.size[1],
      .heads_per_key_head = (int32_t)(args->q.size[1] / args->k.size[1]),
      .seqlen_q = (int32_t)seqlen_q,
      .seqlen_k = (int32_t)(seqlen_k > 0 ? seqlen_k : 0),
      .head_dim = (int32_t)args->q.size[3],
      .is_causal = args->is_causal != 0,
      .causal_offset = dhp_clamp_offset(args),
      .log2_rows = log2_of(rows),
      .scale = args->scale,
      .scale_log2 = scale_log2,
      .highest_score = FLT_MAX / fmaxf(1.f, ldexpf(1.f, exponent)),
      .scale_to_power_of_two = ldexpf(1.f, exponent) - scale_log2,
      .zero = 0,
  };
  dhp_set_schedule(&params, args, plan);
  void *arguments[] = {&q_map, &k_map, &v_map, &params};
  /*
   * A small launch may begin while the one before ends; the kernel waits for that before it touches memory. A larger
   * one would be spread unevenly over multiprocessors that are still partly taken.
   */
  CUlaunchAttribute overlap = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                               .value = {.programmaticStreamSerializationAllowed = 1}};
  const CUlaunchConfig config = {.gridDimX = (unsigned int)plan->grid,
                                 .gridDimY = 1,
                                 .gridDimZ = 1,
                                 .blockDimX = (unsigned int)kernel->threads,
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .sharedMemBytes = (unsigned int)kernel->shared_bytes,
                                 .hStream = stream,
                                 .attrs = &overlap,
                                 .numAttrs = plan->grid <= DHP_MULTIPROCESSORS};
  TRY(cuLaunchKernelEx(&config, function, arguments, NULL));
  return DHP_OK;
}

/* With the device's context current: the loaded function of a kernel, loading it on first use. */
static dhp_status function_of(const dhp_driver *driver, int device, const dhp_kernel_info *kernel, CUfunction *function,
                              dhp_error *error) {
  _Atomic(CUfunction) *const slot = &devices[device].functions[kernel - dhp_kernel_table];
  *function = atomic_load(slot);
  if (*function) return DHP_OK;
  /* A first call may fall into a graph capture on this thread; loading a module is harmless to it. */
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  TRY(cuThreadExchangeStreamCaptureMode(&mode));
  pthread_mutex_lock(&load_lock);
  const dhp_status status = load_kernel(driver, kernel, slot, error);
  pthread_mutex_unlock(&load_lock);
  TRY(cuThreadExchangeStreamCaptureMode(&mode));
  *function = atomic_load(slot);
  return status;
}

dhp_status dhp_cuda_launch(const dhp_attention *args, const dhp_plan *plan, int device, void *stream,
                           dhp_error *error) {
  const dhp_driver *driver;
  dhp_status status = dhp_driver_open(&driver, error);
  if (status != DHP_OK) return status;
  if (device < 0 || device >= MAX_DEVICES)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "device: %d; supported: 0 to %d", device, MAX_DEVICES - 1);
  if (!atomic_load(&devices[device].opened)) {
    pthread_mutex_lock(&load_lock);
    status = open_device(driver, device, error);
    pthread_mutex_unlock(&load_lock);
    if (status != DHP_OK) return status;
  }

  CUcontext current, popped;
  TRY(cuCtxGetCurrent(&current));
  const int push = current != devices[device].context;
  if (push) TRY(cuCtxPushCurrent(devices[device].context));
  CUfunction function;
  status = function_of(driver, device, plan->kernel, &function, error);
  if (status == DHP_OK) status = enqueue(driver, function, args, plan, stream, error);
  if (push) driver->cuCtxPopCurrent(&popped);
  return status;
}
