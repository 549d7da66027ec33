"""Counts by CUPTI: without a GPU what is asked of it, and what is no count; with one, that its counts are right."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dhp_safe_fa.gates import controls, tools
from dhp_safe_fa.gates.counters import cupti, hardware, metrics
from dhp_safe_fa.gates.counters.calls import Calls
from dhp_safe_fa.gates.counters.counting import Count, Request
from dhp_safe_fa.gates.counters.cupti import Counters, Cupti, Launch

CHIP = b"GH100"
BY_CUPTI = [metric for metric in metrics.HARDWARE if metric != metrics.REGISTERS]
# Structure to its name in CUPTI's headers.
STRUCTURES = {
    cupti.Initialize: "CUpti_Profiler_Initialize_Params",
    cupti.GetChipName: "CUpti_Device_GetChipName_Params",
    cupti.HostInitialize: "CUpti_Profiler_Host_Initialize_Params",
    cupti.OfHost: "CUpti_Profiler_Host_Deinitialize_Params",
    cupti.AddMetrics: "CUpti_Profiler_Host_ConfigAddMetrics_Params",
    cupti.GetConfigSize: "CUpti_Profiler_Host_GetConfigImageSize_Params",
    cupti.GetConfig: "CUpti_Profiler_Host_GetConfigImage_Params",
    cupti.GetPasses: "CUpti_Profiler_Host_GetNumOfPasses_Params",
    cupti.Evaluate: "CUpti_Profiler_Host_EvaluateToGpuValues_Params",
    cupti.Enable: "CUpti_RangeProfiler_Enable_Params",
    cupti.OfProfiler: "CUpti_RangeProfiler_Start_Params",
    cupti.GetDataSize: "CUpti_RangeProfiler_GetCounterDataSize_Params",
    cupti.DataInitialize: "CUpti_RangeProfiler_CounterDataImage_Initialize_Params",
    cupti.SetConfig: "CUpti_RangeProfiler_SetConfig_Params",
    cupti.Stop: "CUpti_RangeProfiler_Stop_Params",
    cupti.Decode: "CUpti_RangeProfiler_DecodeData_Params",
    cupti.GetDataInfo: "CUpti_RangeProfiler_GetCounterDataInfo_Params",
}
CONSTANTS = {
    "CUPTI_AutoRange": cupti._AUTO_RANGE,
    "CUPTI_UserReplay": cupti._USER_REPLAY,
    "CUPTI_PROFILER_TYPE_RANGE_PROFILER": cupti._RANGE_PROFILER,
    "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES": cupti._INSUFFICIENT_PRIVILEGES,
    "CUPTI_CB_DOMAIN_DRIVER_API": cupti._DRIVER_API,
    "CUPTI_API_ENTER": cupti._ENTER,
    "CU_FUNC_ATTRIBUTE_NUM_REGS": cupti._NUM_REGS,
    "CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel": 307,
    "CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz": 442,
    "CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel": 477,
    "CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz": 478,
    "CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx": 652,
    "CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz": 653,
}
HEADERS = ("cupti.h", "cupti_target.h", "cupti_profiler_target.h", "cupti_profiler_host.h", "cupti_range_profiler.h")


def include() -> tuple[Path, Path]:
    """The folders of CUPTI's headers, and of the driver's."""
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        for folder in ("include", "extras/CUPTI/include"):
            if (Path(home) / folder / HEADERS[-1]).exists():
                return Path(home) / folder, Path(home) / "include"
    pytest.skip("no CUDA toolkit with CUPTI's headers")


def test_structures_are_those_of_the_headers(tmp_path: Path) -> None:
    """Each member's place, and the size without padding, by a C++ compiler; and constants."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = [f"#include <{header}>" for header in HEADERS] + ["#include <cstddef>", "int main() {"]
    for kind, name in STRUCTURES.items():
        members = [str(member[0]) for member in kind._fields_]
        lines += [f"static_assert(offsetof({name}, {one}) == {getattr(kind, one).offset});" for one in members]
        lines.append(f"static_assert(CUPTI_PROFILER_STRUCT_SIZE({name}, {members[-1]}) == {cupti.size_of(kind)});")
        lines.append(f"static_assert({name}_STRUCT_SIZE == {cupti.size_of(kind)});")
    for member, _ in cupti.CallbackData._fields_:
        offset = getattr(cupti.CallbackData, member).offset
        lines.append(f"static_assert(offsetof(CUpti_CallbackData, {member}) == {offset});")
    lines += [f"static_assert({name} == {value});" for name, value in CONSTANTS.items()]
    source = tmp_path / "structures.cpp"
    source.write_text("\n".join([*lines, "}"]))
    command = [compiler, "-std=c++17", "-fsyntax-only", *(f"-I{folder}" for folder in include()), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:2000]


@pytest.fixture
def library() -> Cupti:
    try:
        return Cupti()
    except tools.NotRun as error:
        pytest.skip(str(error))


def test_a_hopper_knows_all_metrics(library: Cupti) -> None:
    """What it takes is a few passes, which every call of the gate pays for."""
    counters = Counters(library, CHIP, BY_CUPTI)
    assert 1 <= counters.passes <= 6
    counters.close()


@pytest.mark.parametrize(
    ("chip", "metric", "cause"),
    [(CHIP, "no__such.sum", "ConfigAddMetrics failed"), (b"no such", metrics.TIME, "CUPTI_ERROR_INVALID_CHIP_NAME")],
)
def test_what_cupti_does_not_know_is_not_run(chip: bytes, metric: str, cause: str, library: Cupti) -> None:
    with pytest.raises(tools.NotRun, match=cause):
        Counters(library, chip, [metric])


def test_without_cupti_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", nowhere)
    with pytest.raises(tools.NotRun, match=r"libcupti\.so\.13 .* cannot be opened"):
        Cupti()


def test_a_user_who_may_not_count_is_told(library: Cupti, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbids:
        def cuptiRangeProfilerStart(self, _: object) -> int:
            return 35

    monkeypatch.setattr(library, "_library", Forbids())
    with pytest.raises(tools.NotRun, match="no permission to read the GPU's performance counters"):
        library.ask("cuptiRangeProfilerStart", cupti.OfProfiler)


# ---- a GPU that is made of Python ------------------------------------------------------------------------------------


@dataclass
class Gpu:
    """Launches are heard and counted, in two passes; `counted` spoils what is counted, `at_fill` kernels are launched
    when a class is copied."""

    launched: Callable[[str, int], Sequence[str]] = lambda data, number: ("attn",)
    counted: Callable[[list[dict[str, float]]], list[dict[str, float]]] = lambda rows: rows
    at_fill: tuple[str, ...] = ()
    heard: list[Launch] = field(default_factory=list)
    chosen: str = ""
    calls: int = 0

    def fill(self, data: str) -> None:
        self.chosen = data
        self.heard += [Launch(kernel, 8) for kernel in self.at_fill]

    def call(self) -> None:
        self.calls += 1
        self.heard += [Launch(kernel, 168) for kernel in self.launched(self.chosen, self.calls)]

    def count(
        self, _: object, names: Sequence[str], kernels: int, launch: Callable[[], object]
    ) -> list[dict[str, float]]:
        for _ in range(2):
            launch()
        assert metrics.REGISTERS not in names
        assert len(self.heard) <= kernels
        return self.counted([dict.fromkeys(names, 1.0 + number) for number in range(len(self.heard))])


REQUEST = Request((metrics.INSTRUCTIONS, metrics.REGISTERS), {"attn": ("zeros", "normal")}, 1)


def measured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, launches: tuple[tuple[str, str], ...] = ()) -> list[Count]:
    @contextmanager
    def heard(_: object) -> Iterator[list[Launch]]:
        yield gpu.heard

    def calls_of(request: Request) -> Iterator[Calls]:
        yield Calls("attn", "shape", request.subjects["attn"], gpu.fill, gpu.call, launches)

    class Cold:
        def make(self) -> None:
            pass

    class Stream:
        def synchronize(self) -> None:
            pass

    for name, stands_for in {
        "require_gpu": lambda: None,
        "Cupti": lambda: None,
        "launches": heard,
        "calls_of": calls_of,
        "Cold": Cold,
        "count": gpu.count,
    }.items():
        monkeypatch.setattr(hardware, name, stands_for)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    told: list[tuple[int, str]] = []
    found = hardware.measure(REQUEST, lambda done, what: told.append((done, what)))
    assert told == [(2, "attn")]
    return found


def test_each_kernel_is_counted_in_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Gpu(launched=lambda *_: ("tiles", "fwd")), monkeypatch, (("tiles_64", "tiles"), ("attn", "fwd")))
    values = [(count.name, count.data, count.values[metrics.INSTRUCTIONS]) for count in found]
    assert values == [
        ("tiles_64", "zeros", 1), ("attn", "zeros", 2), ("tiles_64", "normal", 3), ("attn", "normal", 4)
    ]  # fmt: skip
    assert {(count.kernels, count.values[metrics.REGISTERS]) for count in found} == {(("tiles", "fwd"), 168)}


def test_data_that_decide_what_is_launched_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(launched=lambda data, _: ("attn", "more") if data == "normal" else ("attn",))
    assert [count.kernels for count in measured(gpu, monkeypatch)] == [("attn",), ("attn", "more")]


@pytest.mark.parametrize(
    ("gpu", "cause"),
    [
        (Gpu(at_fill=("copy",)), "launched outside of every call"),
        (Gpu(launched=lambda _, number: ("attn",) if number < 4 else ("other",)), "passes .* launch different kernels"),
        (Gpu(counted=lambda rows: rows[1:]), "1 kernels were counted of 2"),
        (Gpu(counted=lambda rows: [{one: math.nan for one in row} for row in rows]), "gives no number for smsp__inst"),
        (Gpu(launched=lambda *_: ()), "no kernel of attn was counted"),
    ],
    ids=["outside", "passes differ", "one is missing", "not a number", "nothing"],
)
def test_what_is_no_count_is_not_run(gpu: Gpu, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tools.NotRun, match=cause):
        measured(gpu, monkeypatch)


# ---- a GPU -----------------------------------------------------------------------------------------------------------


def counted(request: Request) -> list[Count]:
    try:
        return hardware.measure(request, lambda *_: None)
    except tools.NotRun as error:
        if "permission" in str(error):
            pytest.skip(str(error))
        raise


def test_the_hardware_counts_what_a_control_executes(gpu: None) -> None:
    """skip_small_p leaves out what small probabilities would do; its clean twin executes the same for all."""
    found = {
        (count.label, count.data): count
        for count in counted(Request(metrics.HARDWARE, {}, 1, ("skip_small_p",), ("zeros", "ascending", "zeros")))
    }
    leak, clean = (
        [found[twin, chosen].values[metrics.INSTRUCTIONS] for chosen in ("zeros", "ascending")]
        for twin in controls.TWINS
    )
    assert leak[0] < leak[1] and clean[0] == clean[1]
    first = found[controls.CLEAN, "zeros"]
    assert first.kernels == ("skip_small_p_clean",)
    assert first.values["smsp__thread_inst_executed.sum"] <= 32 * first.values[metrics.INSTRUCTIONS]
    assert 8 <= first.values[metrics.REGISTERS] <= 255


def test_a_second_run_counts_the_same(gpu: None) -> None:
    """What was enabled is disabled again, and nobody listens any more."""
    request = Request((metrics.INSTRUCTIONS,), {}, 1, ("clock_read",), ("zeros",))
    assert counted(request) == counted(request)
