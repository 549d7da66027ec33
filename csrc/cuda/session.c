/* session.c - opens a device once, loads a kernel once a device, and enqueues launches. */
#include "session.h"

#include <pthread.h>
#include <stdatomic.h>

#include "../error.h"
#include "../kernels/kernel_table.h"
#include "driver.h"

enum {
  MAX_DEVICES = 64, /* of one process */
  MAX_KERNELS = 256 /* shipped ones; checked against the table when a device is opened */
};

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
    return dhp_fail(error, DHP_UNSUPPORTED, "%d kernels built; session.c has room for %d", dhp_kernel_table_size,
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
  TRY(cuModuleGetFunction(&function, module, kernel->entry));
  TRY(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->shared_bytes));
  atomic_store(slot, function);
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

dhp_status dhp_session_begin(dhp_session *session, int device, dhp_error *error) {
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
  CUcontext current;
  TRY(cuCtxGetCurrent(&current));
  const int push = current != devices[device].context;
  if (push) TRY(cuCtxPushCurrent(devices[device].context));
  *session = (dhp_session){.driver = driver, .device = device, .pushed = push};
  return DHP_OK;
}

void dhp_session_end(const dhp_session *session) {
  const dhp_driver *const driver = session->driver;
  CUcontext popped;
  if (session->pushed) driver->cuCtxPopCurrent(&popped);
}

dhp_status dhp_session_launch(const dhp_session *session, const dhp_kernel_info *kernel, int64_t grid, void **arguments,
                              int may_overlap, void *stream, dhp_error *error) {
  const dhp_driver *const driver = session->driver;
  CUfunction function;
  const dhp_status status = function_of(driver, session->device, kernel, &function, error);
  if (status != DHP_OK) return status;
  CUlaunchAttribute overlap = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                               .value = {.programmaticStreamSerializationAllowed = 1}};
  const CUlaunchConfig config = {.gridDimX = (unsigned int)grid,
                                 .gridDimY = 1,
                                 .gridDimZ = 1,
                                 .blockDimX = (unsigned int)kernel->threads,
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .sharedMemBytes = (unsigned int)kernel->shared_bytes,
                                 .hStream = stream,
                                 .attrs = &overlap,
                                 .numAttrs = may_overlap != 0};
  TRY(cuLaunchKernelEx(&config, function, arguments, NULL));
  return DHP_OK;
}
