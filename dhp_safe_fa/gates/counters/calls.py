"""The calls that the gate `counters` makes, with buffers of their own: the addresses are the same in every launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from .. import controls, inputs, l2, planted
from ..subjects import by_name
from .counting import Request, Step

SEED = 20240229  # any: the classes differ by design, not by luck


@dataclass(frozen=True)
class Calls:
    """One call, to be made with several classes of data: a subject's on one shape, or a twin of a control.

    Attributes:
        name: of the subject (of one kernel of the call), or of the control.
        label: the shape, or the twin.
        data: the classes, in the order in which they are run.
        fill: puts a class into the buffers, by copies: no kernel is launched.
        call: launches the kernels, on the current stream.
        launches: name and entry of these, see counting.Step.
    """

    name: str
    label: str
    data: Sequence[str]
    fill: Callable[[str], None]
    call: Callable[[], object]
    launches: Sequence[tuple[str, str]] = ()

    def step(self, data: str) -> Step:
        return Step(self.name, self.label, data, self.launches)


def _of_subject(request: Request, name: str) -> Iterator[Calls]:
    subject, shapes = by_name(name).call(), request.shapes
    data, labels = request.subjects[name], request.labels.get(name, ())
    # of several shapes always the last, which differs most from the first: odd lengths, masked
    several = [*subject.shapes[: shapes - 1], subject.shapes[-1]] if shapes > 1 else subject.shapes[:1]
    for shape in (one for one in several if not labels or str(one) in labels):
        classes = {chosen: subject.make(chosen, shape, SEED, "cuda") for chosen in dict.fromkeys(data)}
        buffers = subject.make("normal", shape, SEED, "cuda")

        def fill(chosen: str, buffers: inputs.Inputs = buffers, classes: dict[str, inputs.Inputs] = classes) -> None:
            for buffer, content in zip(buffers, classes[chosen], strict=True):
                buffer.copy_(content)

        def call(buffers: inputs.Inputs = buffers, is_causal: bool = shape.is_causal) -> None:
            with subject.context():
                subject.attend(buffers, is_causal)

        call()  # loads and plans whatever is loaded and planned once
        yield Calls(name, str(shape), data, fill, call, subject.launches(shape) if subject.launches else ())


def _of_controls(names: Sequence[str], data: Sequence[str]) -> Iterator[Calls]:
    launcher = planted.Planted(controls.load_controls())
    secrets = inputs.planted_secrets(SEED)
    secret, out = torch.empty(inputs.SECRETS, device="cuda"), torch.zeros(inputs.SECRETS, device="cuda")

    def fill(chosen: str) -> None:
        secret.copy_(secrets[chosen])

    for name, twin in product(names, controls.TWINS):

        def call(name: str = name, twin: str = twin) -> None:
            launcher.launch(name, twin, secret, out)

        fill(data[0])
        call()  # the first launch of a kernel loads it
        yield Calls(name, twin, data, fill, call)


def calls_of(request: Request) -> Iterator[Calls]:
    """All calls of a request. Where one is asked for, it has been made once, and may still be running."""
    if request.controls:
        yield from _of_controls(request.controls, request.control_data)
    for name in request.subjects:
        yield from _of_subject(request, name)


class Cold:
    """Empties the L2. Where it is warm, a warp that spins until its data are there spins as often in every run, and the
    control spin_loop is not seen. By a copy, which is no kernel and is not counted."""

    def __init__(self) -> None:
        self._evict, self._unused = l2.eviction_buffer(), l2.eviction_buffer()

    def make(self) -> None:
        """All that was launched before has ended then."""
        self._evict.copy_(self._unused)
        torch.cuda.synchronize()
