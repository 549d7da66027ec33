"""Sustained runs: the meter on a fake NVML, the turns on a fake GPU, and what the command says without either."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_samples import some_result, times
from fake_gpu import FakeGpu
from test_bench_timing import case, kernel

from dhp_safe_fa.bench import Candidate, Case, WrongResult, anchors, meter
from dhp_safe_fa.bench import __main__ as command
from dhp_safe_fa.bench.meter import Meter, Reading
from dhp_safe_fa.bench.results import Outcome, Result, load
from dhp_safe_fa.bench.sustained import SustainedSettings, measure_sustained

WATTS = 650.0
ENOUGH = 10  # looks


class Nvml:
    """Of a GPU that takes WATTS, and whose clock falls by 10 MHz with each look. seconds: the time, as told."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.looks, self.seconds = 0, 0.0
        self.enough = threading.Event()
        self.open = False
        self.uuid = ""

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", self.NVML_CLOCK_SM)
        self.looks += 1
        if self.looks == ENOUGH:
            self.enough.set()
        return 1800 - 10 * self.looks

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return int(self.seconds * WATTS * 1e3)


def test_the_meter_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: nvml.seconds))
    nvml.nvmlInit()
    with Meter(nvml, "GPU-1") as watching:
        for _ in range(2):
            nvml.looks, started = 0, time.perf_counter()
            nvml.enough.clear()
            watching.begin()
            nvml.seconds += 0.2
            assert nvml.enough.wait(60), "it does not look again"
            reading = watching.end()
            looks = nvml.looks
            assert looks <= (time.perf_counter() - started) / meter.PERIOD_S + 2
            assert reading.clock_mhz == pytest.approx(1800 - 10 * (looks + 1) / 2)
            assert reading.power_w == pytest.approx(WATTS)
            time.sleep(3 * meter.PERIOD_S)
            assert nvml.looks == looks, "it goes on after its end"
    assert not nvml.open


def test_opening_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="12-34"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    absent = meter.open_meter()
    assert isinstance(absent, str) and "pip install nvidia-ml-py" in absent and "no clock" in absent
    nvml: Any = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert isinstance(meter.open_meter(), Meter) and nvml.uuid == "GPU-12-34"

    def refused() -> None:
        raise Nvml.NVMLError("no permission")

    nvml.nvmlInit = refused
    assert meter.open_meter() == "no clock and no power: NVML says: no permission"


class FixedMeter:
    """1500 MHz and 700 W, and one more of each with every turn."""

    def __init__(self) -> None:
        self.turns, self.began = 0, 0

    def begin(self) -> None:
        self.began += 1

    def end(self) -> Reading:
        self.turns += 1
        assert self.began == self.turns
        return Reading(1500 + self.turns, 700 + self.turns)


SETTINGS = SustainedSettings(rounds=3, sustained_s=0.5, settle_s=0.1)


def test_turns(gpu: FakeGpu) -> None:
    """A B A B A B: ours has the turns 1, 3 and 5, the peer 2, 4 and 6."""
    watching: Any = FixedMeter()
    lineup = [kernel(gpu, "ours", 100.0), kernel(gpu, "peer", 130.0)]
    result = measure_sustained(case(), lineup, SETTINGS, torch.Generator(), watching)
    ours, peer = result.outcomes
    assert ours.graph_us and ours.graph_us.median == pytest.approx(100.0) and ours.graph_us.samples == 3
    assert result.ratio("peer") == pytest.approx(1.3)
    assert ours.clock_mhz == times(1501, 1503, 1505) and peer.clock_mhz == times(1502, 1504, 1506)
    assert ours.power_w == times(701, 703, 705)
    assert result.flops_per_cycle("ours", 132) == pytest.approx(result.case.flops / (100 * 1503 * 132))


def test_turns_without_a_meter(gpu: FakeGpu) -> None:
    def fails(*_: object) -> torch.Tensor:
        if gpu.captured is not None:
            raise RuntimeError("cannot be captured")
        return kernel(gpu, "peer", 1.0).attend(*_)  # type: ignore[arg-type]

    lineup = [kernel(gpu, "ours", 100.0), Candidate("peer", fails)]
    result = measure_sustained(case(), lineup, SETTINGS, torch.Generator(), None)
    ours, peer = result.outcomes
    assert ours.graph_us and ours.graph_us.median == pytest.approx(100.0)
    assert ours.clock_mhz is None and ours.power_w is None
    assert peer.us is None and peer.reason is not None and "cannot be captured" in peer.reason


def test_wrong_outputs_are_not_run_for_seconds(gpu: FakeGpu) -> None:
    with pytest.raises(WrongResult, match="relative error"):
        measure_sustained(case(), [Candidate("ours", lambda q, k, v, c: v)], SETTINGS, torch.Generator(), None)


# ---- the command ----------------------------------------------------------------------------------------------------


def clocked(result: Result) -> Result:
    return dataclasses.replace(
        result, outcomes=(Outcome("ours", 1e-4, times(10)), Outcome("cudnn", 1e-4, times(8)))
    )


@pytest.mark.usefixtures("a_gpu")
def test_sustained_without_nvml_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    lineups = []

    def measured(case: Case, lineup: list[Candidate], *_: object) -> Result:
        lineups.append([candidate.name for candidate in lineup])
        return clocked(some_result(case))

    monkeypatch.setattr(command, "measure_sustained", measured)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    path = tmp_path / "run.json"
    assert command.main(["--sustained", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert "nvidia-ml-py" in captured.err and "nvidia-ml-py" in captured.out
    report = load(path)
    assert len(report.results) == 13 and lineups[0] == ["ours", "cudnn"]
    assert report.settings["sustained_s"] == 1.0 and report.layout == "BSHD"
    assert all(o.clock_mhz is None for r in report.results for o in r.outcomes)
    assert "fa3~" not in captured.out, "a sustained run has no estimates"


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("installed", [False, True])
def test_estimates_only_where_it_cannot_be_imported(
    installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if installed:
        monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=lambda *_: None))
    monkeypatch.setattr(command, "measure", lambda case, *_: clocked(some_result(case)))
    path = tmp_path / "run.json"
    assert command.main(["--shapes", "anchors", "--json", str(path)]) == 0
    report, shown = load(path), capsys.readouterr().out
    assert ("fa3~" in report.peers()) == (not installed) and ("estimated" in shown) == (not installed)
    if not installed:
        factors = anchors.load(anchors.of_checkout("forward") or pytest.fail("no anchors"))
        assert len(report.results) == 36
        for result in report.results:
            assert result.ratio("fa3~") == pytest.approx(0.8 * factors[result.case])


@pytest.mark.usefixtures("a_gpu")
def test_without_cudnn_nothing_is_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flash = (Outcome("ours", 1e-4, times(10)), Outcome("flash", 1e-4, times(20)))
    monkeypatch.setattr(command, "measure", lambda case, *_: Result(case, flash, 1e-3))
    assert command.main(["--shapes", "anchors", "--peers", "flash"]) == 0
    shown = capsys.readouterr().out
    assert "fa3 is not estimated: that needs cudnn among the peers" in shown and "fa3~" not in shown
