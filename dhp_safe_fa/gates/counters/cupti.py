"""CUPTI, the library by which NVIDIA's profilers count: what the gate `counters` needs of it, called from Python.

NVIDIA CUPTI, "Profiler Host API", "Range Profiling API" and "Callback API"; the structures are those of
cupti_profiler_host.h, cupti_range_profiler.h and cupti_callbacks.h of CUDA 13.0. A function takes one structure, which
begins with its own size.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

from ..tools import NotRun

# torch's wheels bring the library, and have loaded it; else the loader finds it, or a CUDA toolkit has it.
_NAME = "libcupti.so.13"
_IN_TOOLKIT = ("lib64", "extras/CUPTI/lib64", "lib")
_INSUFFICIENT_PRIVILEGES = 35  # CUPTI_ERROR_INSUFFICIENT_PRIVILEGES
_RANGE_PROFILER = 0  # CUPTI_PROFILER_TYPE_RANGE_PROFILER
_AUTO_RANGE = 1  # CUPTI_AutoRange: a range for every kernel; none begins before the one before it has ended
_USER_REPLAY = 3  # CUPTI_UserReplay: whoever launches the kernels does so in every pass


def _structure(name: str, **members: Any) -> type[Structure]:
    """The parameters of a function: their size, NULL, and these members."""
    return type(name, (Structure,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *members.items()]})


def size_of(kind: type[Structure]) -> int:
    """Without padding behind the last member, as CUPTI wants it (CUPTI_PROFILER_STRUCT_SIZE)."""
    last = getattr(kind, str(kind._fields_[-1][0]))
    return int(last.offset + last.size)


# fmt: off
_NAMES = {"ppMetricNames": POINTER(c_char_p), "numMetrics": c_size_t}
_HOST = {"pHostObject": c_void_p}
_DATA = {"pCounterDataImage": c_void_p, "counterDataImageSize": c_size_t}
_PROFILER = {"pRangeProfilerObject": c_void_p}
Initialize = _structure("Initialize")
GetChipName = _structure("GetChipName", deviceIndex=c_size_t, pChipName=c_char_p)
HostInitialize = _structure(
    "HostInitialize", profilerType=c_int, pChipName=c_char_p, pCounterAvailabilityImage=c_void_p, **_HOST
)
OfHost = _structure("OfHost", **_HOST)
AddMetrics = _structure("AddMetrics", **_HOST, **_NAMES)
GetConfigSize = _structure("GetConfigSize", **_HOST, configImageSize=c_size_t)
GetConfig = _structure("GetConfig", **_HOST, configImageSize=c_size_t, pConfigImage=c_void_p)
GetPasses = _structure("GetPasses", configImageSize=c_size_t, pConfigImage=c_void_p, numOfPasses=c_size_t)
Evaluate = _structure("Evaluate", **_HOST, **_DATA, rangeIndex=c_size_t, **_NAMES, pMetricValues=c_void_p)
Enable = _structure("Enable", ctx=c_void_p, **_PROFILER)
OfProfiler = _structure("OfProfiler", **_PROFILER)
GetDataSize = _structure(
    "GetDataSize", **_PROFILER, pMetricNames=POINTER(c_char_p), numMetrics=c_size_t, maxNumOfRanges=c_size_t,
    maxNumRangeTreeNodes=c_uint32, counterDataSize=c_size_t,
)
DataInitialize = _structure("DataInitialize", **_PROFILER, counterDataSize=c_size_t, pCounterData=c_void_p)
SetConfig = _structure(
    "SetConfig", **_PROFILER, configSize=c_size_t, pConfig=c_void_p, counterDataImageSize=c_size_t,
    pCounterDataImage=c_void_p, range=c_int, replayMode=c_int, maxRangesPerPass=c_size_t, numNestingLevels=c_uint16,
    minNestingLevel=c_uint16, passIndex=c_size_t, targetNestingLevel=c_uint16,
)
Stop = _structure(
    "Stop", **_PROFILER, passIndex=c_size_t, targetNestingLevel=c_size_t, isAllPassSubmitted=c_uint8
)
Decode = _structure("Decode", **_PROFILER, numOfRangeDropped=c_size_t)
GetDataInfo = _structure("GetDataInfo", **_DATA, numTotalRanges=c_size_t)
# fmt: on


def _open() -> ctypes.CDLL:
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    for path in (_NAME, *(f"{home}/{folder}/{_NAME}" for home in homes for folder in _IN_TOOLKIT)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise NotRun(f"{_NAME} (CUPTI: a part of torch's wheels, and of the CUDA toolkit) cannot be opened")


class Cupti:
    """The library. NotRun if there is none, or none of CUDA 13, and if a call fails."""

    def __init__(self) -> None:
        self._library = _open()

    def call(self, function: str, *arguments: object) -> None:
        """Any function that returns a CUptiResult."""
        status = getattr(self._library, function)(*arguments)
        if status == _INSUFFICIENT_PRIVILEGES:
            raise NotRun("no permission to read the GPU's performance counters (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)")
        if status:
            text = c_char_p()
            self._library.cuptiGetResultString(status, byref(text))
            raise NotRun(f"{function} failed: {(text.value or b'unknown').decode()} ({status})")

    def ask(self, function: str, kind: type[Structure], **members: Any) -> Any:
        """A function that takes a structure: filled with these members, and returned."""
        parameters = kind(structSize=size_of(kind), **members)
        self.call(function, byref(parameters))
        return parameters


class Counters:
    """How some metrics are counted on a kind of chip, and what was. Needs no GPU.

    Attributes:
        passes: how many times everything has to be launched.
        config: for the GPU.
    """

    def __init__(self, cupti: Cupti, chip: bytes, metrics: Sequence[str]) -> None:
        """chip: "GH100". metrics: by the names of ``ncu --query-metrics``, with their suffix."""
        self._cupti, self.metrics = cupti, tuple(metrics)
        self.names = (c_char_p * len(metrics))(*[metric.encode() for metric in metrics])
        ask = cupti.ask
        made = ask("cuptiProfilerHostInitialize", HostInitialize, profilerType=_RANGE_PROFILER, pChipName=chip)
        host = {"pHostObject": made.pHostObject}
        self._host = host
        ask("cuptiProfilerHostConfigAddMetrics", AddMetrics, **host, ppMetricNames=self.names, numMetrics=len(metrics))
        size = ask("cuptiProfilerHostGetConfigImageSize", GetConfigSize, **host).configImageSize
        self.config = ctypes.create_string_buffer(size)
        image = {"configImageSize": size, "pConfigImage": ctypes.addressof(self.config)}
        ask("cuptiProfilerHostGetConfigImage", GetConfig, **host, **image)
        self.passes = int(ask("cuptiProfilerHostGetNumOfPasses", GetPasses, **image).numOfPasses)

    def values(self, data: ctypes.Array[ctypes.c_char], kernel: int) -> dict[str, float]:
        """What was counted of one kernel, by its number."""
        row = (ctypes.c_double * len(self.metrics))()
        self._cupti.ask(
            "cuptiProfilerHostEvaluateToGpuValues",
            Evaluate,
            **self._host,
            pCounterDataImage=ctypes.addressof(data),
            counterDataImageSize=len(data),
            rangeIndex=kernel,
            ppMetricNames=self.names,
            numMetrics=len(self.metrics),
            pMetricValues=ctypes.addressof(row),
        )
        return dict(zip(self.metrics, row, strict=True))

    def close(self) -> None:
        self._cupti.ask("cuptiProfilerHostDeinitialize", OfHost, **self._host)


def count(cupti: Cupti, metrics: Sequence[str], kernels: int, launch: Callable[[], object]) -> list[dict[str, float]]:
    """Metric to value of each kernel that `launch` launches, in their order; it is called once for each pass.

    kernels: how many it launches at most. NotRun if they are more, or passes are left.
    """
    cupti.ask("cuptiProfilerInitialize", Initialize)
    context, device = c_void_p(), c_uint32()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(byref(context))
    cupti.call("cuptiGetDeviceId", context, byref(device))
    chip = cupti.ask("cuptiDeviceGetChipName", GetChipName, deviceIndex=device.value).pChipName
    counters = Counters(cupti, chip, metrics)
    of = {"pRangeProfilerObject": cupti.ask("cuptiRangeProfilerEnable", Enable, ctx=context).pRangeProfilerObject}
    try:
        size = cupti.ask(
            "cuptiRangeProfilerGetCounterDataSize",
            GetDataSize,
            **of,
            pMetricNames=counters.names,
            numMetrics=len(metrics),
            maxNumOfRanges=kernels,
            maxNumRangeTreeNodes=kernels,
        ).counterDataSize
        data = ctypes.create_string_buffer(size)
        at = ctypes.addressof(data)
        cupti.ask(
            "cuptiRangeProfilerCounterDataImageInitialize", DataInitialize, **of, counterDataSize=size, pCounterData=at
        )
        cupti.ask(
            "cuptiRangeProfilerSetConfig",
            SetConfig,
            **of,
            configSize=len(counters.config),
            pConfig=ctypes.addressof(counters.config),
            counterDataImageSize=size,
            pCounterDataImage=at,
            range=_AUTO_RANGE,
            replayMode=_USER_REPLAY,
            maxRangesPerPass=kernels,
            numNestingLevels=1,
            minNestingLevel=1,
            targetNestingLevel=1,
        )
        is_last = False
        for _ in range(counters.passes):
            cupti.ask("cuptiRangeProfilerStart", OfProfiler, **of)
            launch()
            is_last = bool(cupti.ask("cuptiRangeProfilerStop", Stop, **of).isAllPassSubmitted)
        dropped = cupti.ask("cuptiRangeProfilerDecodeData", Decode, **of).numOfRangeDropped
        if dropped or not is_last:
            raise NotRun(f"CUPTI dropped {dropped} kernels, after {counters.passes} passes (all: {is_last})")
        image = {"pCounterDataImage": at, "counterDataImageSize": size}
        counted = cupti.ask("cuptiRangeProfilerGetCounterDataInfo", GetDataInfo, **image).numTotalRanges
        return [counters.values(data, kernel) for kernel in range(counted)]
    finally:
        cupti.ask("cuptiRangeProfilerDisable", OfProfiler, **of)
        counters.close()


class CallbackData(Structure):
    """CUpti_CallbackData, as far as it is read."""

    _fields_ = [
        ("callbackSite", c_int),
        ("functionName", c_char_p),
        ("functionParams", POINTER(c_void_p)),
        ("functionReturnValue", c_void_p),
        ("symbolName", c_char_p),
    ]


_Callback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_uint32, POINTER(CallbackData))
_DRIVER_API = 1  # CUPTI_CB_DOMAIN_DRIVER_API
_ENTER = 0  # CUPTI_API_ENTER
_NUM_REGS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
# Of cuLaunchKernel, cuLaunchCooperativeKernel and cuLaunchKernelEx, and of each one's form for a default stream of a
# thread's own: its number in cupti_driver_cbid.h, and which of its parameters is the kernel.
_LAUNCHES = {307: 0, 442: 0, 477: 0, 478: 0, 652: 1, 653: 1}


@dataclass(frozen=True)
class Launch:
    """A kernel that was launched, and the registers that each of its threads has."""

    kernel: str
    registers: int


@contextmanager
def launches(cupti: Cupti) -> Iterator[list[Launch]]:
    """Kernels, as they are launched one by one (not by a CUDA graph), are added to the list, in whichever stream."""
    heard: list[Launch] = []
    cuda, subscriber = ctypes.CDLL("libcuda.so.1"), c_void_p()

    def hear(_: object, __: int, function: int, data: Any) -> None:
        said = data.contents
        if said.callbackSite == _ENTER:
            registers = c_int()
            kernel = c_void_p(said.functionParams[_LAUNCHES[function]])
            cuda.cuFuncGetAttribute(byref(registers), _NUM_REGS, kernel)
            heard.append(Launch(said.symbolName.decode(), registers.value))

    callback = _Callback(hear)  # has to outlive the subscription
    cupti.call("cuptiSubscribe", byref(subscriber), callback, None)
    try:
        for function in _LAUNCHES:
            cupti.call("cuptiEnableCallback", 1, subscriber, _DRIVER_API, function)
        yield heard
    finally:
        cupti.call("cuptiUnsubscribe", subscriber)
