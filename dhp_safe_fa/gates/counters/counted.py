"""What Nsight Compute runs for the gate `counters`: makes the launches that are to be counted, and no other in a range.

    python -m dhp_safe_fa.gates.counters.counted REQUEST

REQUEST is a JSON file that holds a ``ncu.Request``. A line of standard output tells how far it is. What was
launched is written to the file of "steps", one object for each NVTX range dhp:NUMBER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from .. import controls, inputs, l2, planted
from ..subjects import Subject, by_name

SEED = 20240229  # any: the classes differ by design, not by luck


@dataclass(frozen=True)
class Step:
    """One call to be counted: what for (subject or control), shape or twin, with which data, the call, and name and
    entry of the kernels that it launches, each to be told apart (none: all that run are counted together)."""

    name: str
    label: str
    data: str
    call: Callable[[], object]
    launches: Sequence[tuple[str, str]] = ()


@contextmanager
def _profiler() -> Iterator[None]:
    """On for all steps of a label, because to start and stop it takes as long as a short launch: between them there may
    be copies, and a kernel that is in no step's range is an error."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.profiler.stop()


def _subject_steps(
    name: str, subject: Subject, shapes: int, data: list[str], labels: Sequence[str] = ()
) -> Iterator[Step]:
    """Fixed buffers, into which each class is copied: the addresses are the same in every launch. name: of one kernel
    of the call. labels: of the shapes that are run, if not all are."""
    # of several shapes always the last, which differs most from the first: odd lengths, masked
    several = [*subject.shapes[: shapes - 1], subject.shapes[-1]] if shapes > 1 else subject.shapes[:1]
    for shape in (one for one in several if not labels or str(one) in labels):
        classes = {name: subject.make(name, shape, SEED, "cuda") for name in dict.fromkeys(data)}
        buffers = subject.make("normal", shape, SEED, "cuda")

        def call(buffers: inputs.Inputs = buffers, is_causal: bool = shape.is_causal) -> None:
            with subject.context():
                subject.attend(buffers, is_causal)

        call()  # loads and plans whatever is loaded and planned once
        launches = subject.launches(shape) if subject.launches else ()
        with _profiler():
            for chosen in data:
                for buffer, content in zip(buffers, classes[chosen], strict=True):
                    buffer.copy_(content)
                yield Step(name, str(shape), chosen, call, launches)


def _control_steps(names: list[str], data: list[str]) -> Iterator[Step]:
    loaded = controls.load_controls()
    launcher = planted.Planted(loaded)
    secrets = inputs.planted_secrets(SEED)
    secret, out = torch.empty(inputs.SECRETS, device="cuda"), torch.zeros(inputs.SECRETS, device="cuda")
    for name, twin in product(names, controls.TWINS):

        def call(name: str = name, twin: str = twin) -> None:
            launcher.launch(name, twin, secret, out)

        secret.copy_(secrets[data[0]])
        call()  # the first launch of a kernel loads it
        with _profiler():
            for chosen in data:
                secret.copy_(secrets[chosen])
                yield Step(name, twin, chosen, call)


def _steps(request: dict[str, Any]) -> Iterator[Step]:
    if request["controls"]:
        yield from _control_steps(request["controls"], request["control_data"])
    for name, data in request["subjects"].items():
        yield from _subject_steps(name, by_name(name).call(), request["shapes"], data, request["labels"].get(name, ()))


def main(path: Path) -> None:
    torch.set_grad_enabled(False)
    request = json.loads(path.read_text())
    evict, unused = l2.eviction_buffer(), l2.eviction_buffer()
    done = []
    for number, step in enumerate(_steps(request)):
        # where the L2 is warm, a warp that spins until its data are there spins as often in every run, and the control
        # spin_loop is not seen; a copy is no kernel, which would be counted
        evict.copy_(unused)
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(f"dhp:{number}:")
        step.call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        done.append({"name": step.name, "label": step.label, "data": step.data, "launches": step.launches})
        print(f"{number + 1} {step.name}", flush=True)
    Path(request["steps"]).write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
