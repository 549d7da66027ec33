/*
 * driver.h - the CUDA driver, opened at run time, so that the library loads on a machine without one.
 */
#ifndef DHP_DRIVER_H
#define DHP_DRIVER_H

#include <cuda.h>

#include "../dhp_fa.h"

/* The driver functions we call, under their own names; versioned symbols are chosen where the header chooses them. */
typedef struct dhp_driver {
  CUresult (*cuInit)(unsigned int);
  CUresult (*cuDeviceGet)(CUdevice *, int);
  CUresult (*cuDeviceGetAttribute)(int *, CUdevice_attribute, CUdevice);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext *, CUdevice);
  CUresult (*cuCtxGetCurrent)(CUcontext *);
  CUresult (*cuCtxPushCurrent)(CUcontext);
  CUresult (*cuCtxPopCurrent)(CUcontext *);
  CUresult (*cuModuleLoadData)(CUmodule *, const void *);
  CUresult (*cuModuleGetFunction)(CUfunction *, CUmodule, const char *);
  CUresult (*cuFuncSetAttribute)(CUfunction, CUfunction_attribute, int);
  CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode *);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                     const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*cuGetErrorName)(CUresult, const char **);
} dhp_driver;

/* The open driver, initialised, or a status that says why there is none. Thread-safe; opened once. */
dhp_status dhp_driver_open(const dhp_driver **driver, dhp_error *error);

/* DHP_OK, or DHP_DRIVER_ERROR with the name of the call and of the error. */
dhp_status dhp_driver_check(const dhp_driver *driver, CUresult result, const char *call, dhp_error *error);

#endif
