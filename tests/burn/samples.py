"""Synthetic measurements and records for the tests of the burn loop."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dhp_safe_fa.burn.log.file import Log
from dhp_safe_fa.burn.log.records import Chip, Gate, Kernel, Profile, Record, Shape
from dhp_safe_fa.burn.measuring.blocks import BLOCKS, PEER_STRIDE
from dhp_safe_fa.gates import registry

H100 = Chip("NVIDIA H100 80GB HBM3", 132, 1980, 3352.0, "700.00 W", "580.1", "13.0", 91900, "2.11.0+cu130")
CASES = ("1,8,512,64:full:float16", "1,16,1024,64:full:float16", "4,16,4096,128:causal:float16")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PASSED = [Gate(name, "PASS") for name in registry.NAMES]
KERNEL = Kernel("fwd_float16_d64", "ab" * 32, 168, 0, 90000, wgmma=24, tma=6)
# 536 MB of q kᵀ in the last case, 35 MB moved: fused. The tensor pipe is busy enough for I5.
PROFILES = [
    Profile(CASES[1], us=15.0, sm_percent=60.0, tensor_percent=33.0, dram_bytes=8_400_000,
            issued_instructions=10**6, executed_instructions=10**6),
    Profile(CASES[2], us=510.0, sm_percent=80.0, tensor_percent=58.2, dram_bytes=134_000_000,
            issued_instructions=10**7, executed_instructions=10**7),
]  # fmt: skip


def blocks(rng: random.Random, us: float, clock: Sequence[float]) -> list[float | None]:
    """Times of one build: the clock of each block, 0.3 % from where its code and data lie, 0.2 % of plain noise, and
    one sample in a hundred disturbed by 5 %."""
    times: list[float | None] = []
    for factor in clock:
        disturbed = 1.05 if rng.random() < 0.01 else 1.0
        times.append(us * factor * disturbed * rng.gauss(1, 0.003) * rng.gauss(1, 0.002))
    return times


def shapes(rng: random.Random, gain: float = 1.0, *, same: bool = False, cases: Sequence[str] = CASES) -> list[Shape]:
    """Times of a run in which the previous best takes `gain` times as long as ours; the clock drifts by per cents."""
    found = []
    for i, case in enumerate(cases):
        clock = [rng.gauss(1, 0.02) for _ in range(BLOCKS)]
        us = {
            "ours": blocks(rng, 100.0 + i, clock),
            "previous": blocks(rng, (100.0 + i) * gain, clock),
            "again": blocks(rng, 100.0 + i, clock),
            "cudnn": [90.0] * BLOCKS,
            "flash": [150.0] * BLOCKS,
        }
        for name, times in us.items():
            for block in range(BLOCKS):
                if name != "ours" and (block % PEER_STRIDE == 0) != (name in ("cudnn", "flash")):
                    times[block] = None
        launch = {"ours": "cubin a, grid 1", "previous": "cubin a, grid 1" if same else "cubin b, grid 1"}
        found.append(Shape(case, us, launch=launch))
    return found


def alone(found: list[Shape]) -> list[Shape]:
    """The same without a previous best."""
    kept = ("ours", "cudnn", "flash")
    return [Shape(s.case, {name: s.us[name] for name in kept}, launch={"ours": s.launch["ours"]}) for s in found]


def run(
    name: str,
    found: list[Shape],
    *,
    log: Log | None = None,
    gates: Sequence[Gate] = PASSED,
    milestones: Sequence[str] = (),
    chip: Chip = H100,
) -> Record:
    """A run; compared with the log's best if there is one."""
    best = log.best("forward") if log else None
    failed = any(gate.verdict == "FAIL" for gate in gates)
    return Record(
        name=name,
        kind="run",
        date="2026-11-21T06:00:00+00:00",
        commit=COMMIT,
        chip=chip,
        settings={"full": False, "shapes": None, "blocks": BLOCKS},
        hypothesis="it is faster",
        prediction="+5%",
        nvcc="13.0.88",
        library_sha256="cd" * 32,
        kernels=[KERNEL],
        parent=log.parent(best) if log and best else None,
        gates=list(gates),
        profiles=None if failed else PROFILES,
        shapes=[] if failed else found,
        milestones=list(milestones),
    )
