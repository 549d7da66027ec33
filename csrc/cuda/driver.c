#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "../error.h"

#define STRINGIFY(x) #x
#define SYMBOL(name) STRINGIFY(name) /* expands the header's macros first: cuCtxPushCurrent is cuCtxPushCurrent_v2 */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dhp_driver driver_functions;
static dhp_status open_status;
static dhp_error open_error;

/* dlsym returns an object pointer; copying its bytes is the portable way to a function pointer. */
static int find(void *library, const char *symbol, void *function) {
  void *const address = dlsym(library, symbol);
  memcpy(function, &address, sizeof address);
  return address != NULL;
}

static void open_once(void) {
  void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    open_status = dhp_fail(&open_error, DHP_NO_GPU, "no CUDA driver: libcuda.so.1 could not be opened");
    return;
  }
  dhp_driver *const d = &driver_functions;
#define FIND(name) find(library, SYMBOL(name), &d->name)
  const int complete = FIND(cuInit) & FIND(cuDeviceGet) & FIND(cuDeviceGetAttribute) & FIND(cuDevicePrimaryCtxRetain) &
                       FIND(cuCtxGetCurrent) & FIND(cuCtxPushCurrent) & FIND(cuCtxPopCurrent) & FIND(cuModuleLoadData) &
                       FIND(cuModuleGetFunction) & FIND(cuFuncSetAttribute) & FIND(cuThreadExchangeStreamCaptureMode) &
                       FIND(cuTensorMapEncodeTiled) & FIND(cuLaunchKernelEx) & FIND(cuGetErrorName);
#undef FIND
  if (!complete) {
    open_status = dhp_fail(&open_error, DHP_NO_GPU, "the CUDA driver is too old: it must support CUDA 12.0 or newer");
    return;
  }
  open_status = dhp_driver_check(d, d->cuInit(0), "cuInit", &open_error);
}

dhp_status dhp_driver_open(const dhp_driver **driver, dhp_error *error) {
  pthread_once(&once, open_once);
  *driver = &driver_functions;
  if (open_status != DHP_OK) return dhp_fail(error, open_status, "%s", open_error.text);
  return DHP_OK;
}

dhp_status dhp_driver_check(const dhp_driver *driver, CUresult result, const char *call, dhp_error *error) {
  if (result == CUDA_SUCCESS) return DHP_OK;
  const char *name = NULL;
  driver->cuGetErrorName(result, &name);
  return dhp_fail(error, DHP_DRIVER_ERROR, "%s failed: %s", call, name ? name : "unknown error");
}
