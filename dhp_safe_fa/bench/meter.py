"""Clock and power of the GPU while something runs: NVML, through nvidia-ml-py."""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

import torch

# Seconds between two looks at the clock: some hundred in a second, and a look takes microseconds.
PERIOD_S = 0.01


class Reading(NamedTuple):
    """clock_mhz: mean of the multiprocessors' clock. power_w: the energy counter's difference by time."""

    clock_mhz: float
    power_w: float


class Meter:
    """Of one GPU. ``begin`` starts a thread that looks at the clock, ``end`` stops it and returns what there was."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._clocks: list[float] = []
        self._millijoules, self._started = self._energy(), 0.0

    def begin(self) -> None:
        self._clocks = [self._clock()]
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._millijoules, self._started = self._energy(), time.perf_counter()
        self._thread.start()

    def end(self) -> Reading:
        watts = (self._energy() - self._millijoules) / 1e3 / (time.perf_counter() - self._started)
        self._stop.set()
        if self._thread:
            self._thread.join()
        return Reading(statistics.fmean(self._clocks), watts)

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._clocks.append(self._clock())

    def _clock(self) -> float:
        """MHz."""
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def _energy(self) -> float:
        """Millijoules since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        self._nvml.nvmlShutdown()


def open_meter() -> Meter | str:
    """Of torch's current GPU; or one sentence that says why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "no clock and no power: nvidia-ml-py, which reads them, is not installed (pip install nvidia-ml-py)"
    try:
        nvml.nvmlInit()
        return Meter(nvml, f"GPU-{torch.cuda.get_device_properties().uuid}")
    except nvml.NVMLError as error:
        return f"no clock and no power: NVML says: {error}"
