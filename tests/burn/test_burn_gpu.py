"""The loop's measurements on a GPU: the same build twice is no difference, and a call slowed by 5 % is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from harness import needs_hopper
from torch import Tensor

from dhp_safe_fa.bench import Candidate, Case, Settings
from dhp_safe_fa.burn import verdict
from dhp_safe_fa.burn.builds import keeping
from dhp_safe_fa.burn.builds.library import HEADER, LIBRARY, Library
from dhp_safe_fa.burn.measuring import blocks, chip, profiling
from dhp_safe_fa.gates import registry

pytestmark = [needs_hopper, pytest.mark.long]

CASES = [Case(4, 16, 1024, 64, False, "float16"), Case(4, 16, 4096, 128, True, "float16")]
PASSED = dict.fromkeys(registry.NAMES, "PASS")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(keeping, "KEPT", tmp_path / "kept")
    return keeping.keep(keeping.ROOT / "dhp_safe_fa" / LIBRARY, keeping.ROOT / "csrc" / HEADER)


Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def measured(ours: Attend, previous: Attend, again: Attend, cases: Sequence[Case]) -> verdict.Verdict:
    """As a run measures, without peers; the verdict does not know that the cubins are the same."""
    builds_timed = [Candidate("ours", ours), Candidate("previous", previous), Candidate("again", again)]

    def lineup(case: Case, block: int) -> list[Candidate]:
        return blocks.interleaved(builds_timed, [], block)

    settings = Settings(rounds=4, sample_ms=15, eager=False)
    shapes = blocks.measure_all(cases, lineup, settings, blocks.BLOCKS, "cuda", {}, lambda: None)
    for shape in shapes:
        shape.launch.update(ours="one", previous="other")
    found = verdict.judge(PASSED, registry.NAMES, [shape.timed() for shape in shapes])
    print(found)
    return found


def test_the_same_build_twice_is_undecided(library: Library) -> None:
    previous, again = (blocks.copy_of(library).attend for _ in range(2))
    found = measured(library.attend, previous, again, CASES)
    assert found.decision == "undecided"


def test_five_per_cent_slower_is_rolled_back(library: Library) -> None:
    """The previous best is the build as it is; ours idles for 5 % of its time after every call."""
    case = CASES[1]
    q, k, v = (torch.randn(case.shape, device="cuda").half() for _ in range(3))

    def timed(call: Callable[[], object], calls: int = 50) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    cycles_per_second = 10**6 / timed(lambda: torch.cuda._sleep(10**6))
    cycles = round(0.05 * timed(lambda: library.attend(q, k, v, True)) * cycles_per_second)

    def slowed(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = library.attend(q, k, v, is_causal)
        torch.cuda._sleep(cycles)
        return out

    found = measured(slowed, library.attend, slowed, [case])
    assert found.decision == "roll back"
    assert found.ratio is not None and 0.92 < found.ratio.median < 0.97


def test_counters(library: Library) -> None:
    cases = [*CASES, Case(8, 32, 700, 128, False, "float16", key_heads=4, key_seqlen=3000)]
    profiles = profiling.profile(library, "forward", cases)
    assert [profile.case for profile in profiles] == [case.label for case in cases]
    for profile, case in zip(profiles, cases, strict=True):
        assert 0 < profile.tensor_percent < 100 and 0 < profile.sm_percent < 100
        assert profile.us > chip.floors(case, chip.here()).highest
        assert profile.executed_instructions > 0 and profile.dram_bytes > 0
