"""What the gates that execute kernels put under test: the shipped kernels, or a peer, on public shapes.

How a shipped kernel is reached, its family says (families/).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa import _inspect
from dhp_safe_fa._sdpa import HOPPER
from dhp_safe_fa.bench import peers
from dhp_safe_fa.bench.gradients import peers as gradient_peers

from . import gradients, inputs
from .bitwise.key_rows import gradient_ways
from .bitwise.rows import Form, Way, attention_ways
from .inputs import Inputs, Shape
from .targets import BACKWARD, PEERS, require_shipped
from .timing import inputs as timing_inputs
from .tools import NotRun

# (inputs, is_causal) -> all outputs
Attend = Callable[[Inputs, bool], tuple[Tensor, ...]]
# (inputs, causal_offset) -> all outputs of causal attention
AttendOffset = Callable[[Inputs, int], tuple[Tensor, ...]]
# (name of a class, shape, seed, device) -> inputs
Make = Callable[[str, Shape, int, str], Inputs]
MakeWays = Callable[["Subject", Inputs, Inputs, bool], list[Way]]
# (shape, seed, device) -> class to inputs
MakeClasses = Callable[[Shape, int, str], dict[str, Inputs]]

# Batch, heads and length: 128 CTAs of 128 queries nearly fill an H100, and 8 tiles of keys are enough for every stage
# of a pipeline.
REFERENCE = (1, 16, 1024)


@dataclass(frozen=True)
class Subject:
    """What is under test. What it reads and writes is said here alone: no gate takes its inputs apart. The defaults are
    those of attention's forward pass.

    Attributes:
        name: a shipped kernel's name, or a peer's.
        attend: (inputs, is_causal) -> all outputs.
        context: to be entered around every call.
        kernels: names of the shipped kernels that the shapes launch; empty for a peer, whose kernels are all counted.
        shapes: on which it is run.
        cubin_sha256: of the shipped kernel; empty for a peer.
        attend_offset: the same with a causal_offset; None if there is no such thing.
        outputs: names of what attend returns.
        ways: in which rows are computed again (bitwise/rows.py): (subject, inputs, stranger, is_causal) -> ways.
        make: inputs of a class of inputs.CLASSES.
        matched: classes with equal bit statistics, by the names of timing/inputs.py.
        power: classes that draw unlike power, by the names of timing/inputs.py.
        classes: what `make` knows; among them all of inputs.CLASSES.
        tested: names of `matched` that are compared with its reference.
        row_classes: classes whose rows are computed again, and the class that is beside them.
        forms: in which its rows are computed again (bitwise/forms.py), by name; none for a peer.
        entry: name of the kernel that is under test where a call launches others beside it; empty: all of them are.
        why_not: why a shipped kernel cannot be run, which then has no shapes; else empty.
        whole: the operator's whole call as a subject, for a gate that looks at calls, where the attributes above are of
            one kernel among several. It has the same name for all subjects of the same call.
        launches: name and entry of the kernels that a call on a shape launches, in order; None if nobody says so.
    """

    name: str
    attend: Attend
    context: Callable[[], AbstractContextManager[object]]
    kernels: tuple[str, ...]
    shapes: tuple[Shape, ...]
    cubin_sha256: str = ""
    attend_offset: AttendOffset | None = None
    outputs: tuple[str, ...] = ("out", "lse")
    ways: MakeWays = attention_ways
    make: Make = inputs.make
    matched: MakeClasses = timing_inputs.matched
    power: MakeClasses = timing_inputs.power
    classes: tuple[str, ...] = tuple(inputs.CLASSES)
    tested: tuple[str, ...] = timing_inputs.MATCHED
    row_classes: Mapping[str, str] = field(default_factory=lambda: inputs.ROW_CLASSES)
    forms: Mapping[str, Form] = field(default_factory=dict)
    entry: str = ""
    why_not: str = ""
    whole: Callable[[], Subject] | None = None
    launches: Callable[[Shape], list[tuple[str, str]]] | None = None

    def call(self) -> Subject:
        """The operator's whole call that this is a part of."""
        return self.whole() if self.whole else self


def require_gpu() -> None:
    """NotRun unless the current CUDA device is a Hopper GPU, which is what kernels and controls are built for."""
    if not torch.cuda.is_available():
        raise NotRun("no CUDA GPU, or a torch without CUDA")
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        name = torch.cuda.get_device_name()
        raise NotRun(f"{name} has compute capability {capability[0]}.{capability[1]}; 9.0 (Hopper) is needed")


def require_shapes(subjects: Iterable[Subject]) -> None:
    """NotRun if a subject has no shape: nothing would be looked at, and nothing found."""
    for subject in subjects:
        if not subject.shapes:
            raise NotRun(f"{subject.name}: has no shape to be run on")


def _refuse(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
    raise NotRun("this kernel cannot be run")


def _of_family(kernel: dict[str, Any]) -> Subject:
    """A kernel of ``_inspect.kernels()`` as its family puts it under test. One that cannot be run does not stop the
    others: it says why."""
    name, family = str(kernel["name"]), str(kernel["family"])
    try:
        found: Subject = importlib.import_module(f"{__package__}.families.{family}").subject(kernel)
        return found
    except (NotRun, ModuleNotFoundError) as error:
        return Subject(name, _refuse, nullcontext, (name,), (), str(kernel["cubin_sha256"]), why_not=str(error))


def shipped(names: Sequence[str] | None = None) -> list[Subject]:
    """The shipped kernels of those names, or all of them. NotRun names what there is."""
    kernels = _inspect.kernels()
    if not kernels:
        raise NotRun("no shipped kernel: the package was built without nvcc")
    require_shipped(names, [str(kernel["name"]) for kernel in kernels])
    return [_of_family(kernel) for kernel in kernels if names is None or kernel["name"] in names]


def _peer_shapes() -> tuple[Shape, ...]:
    """Self-attention that all peers support; a FlashAttention-3 may be built for bfloat16 alone."""
    batch, heads, seqlen = REFERENCE
    full = Shape(batch, heads, heads, seqlen, seqlen, 128, "bfloat16", False)
    odd = replace(full, seqlen_q=seqlen + 13, seqlen_k=seqlen + 13, is_causal=True)
    return full, replace(full, is_causal=True), replace(full, head_dim=64), odd


def _peer_gradients(name: str) -> Subject:
    """The backward pass of a peer, with what this project's forward gives. FlashAttention-3's is reached through
    autograd, so that its calls compute the forward, too. NotRun if it is not there."""
    short = name.removeprefix("sdpa-").removesuffix(BACKWARD)
    if short in gradient_peers.OPERATORS:
        _, differentiate = gradient_peers.OPERATORS[short]
    else:
        attention = gradient_peers.flash_attention_3(gradient_peers.FLASH_ATTENTION_3[short])
        if isinstance(attention, str):
            raise NotRun(f"--peer {name}: flash_attn_interface cannot be imported ({attention})")
        differentiate = gradient_peers.at_once(attention)

    def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        q, k, v, out, lse, grad_out, _ = inputs  # none of them has an lse to differentiate
        return differentiate(q, k, v, out, lse, grad_out, is_causal)

    return Subject(
        name,
        attend,
        nullcontext,
        (),
        _peer_shapes(),
        outputs=("dq", "dk", "dv"),
        ways=gradient_ways,
        make=gradients.make,
        matched=gradients.matched,
        power=gradients.power,
        classes=gradients.CLASSES,
        tested=gradients.TESTED,
        row_classes=gradients.ROW_CLASSES,
    )


def peer(name: str) -> Subject:
    """A peer of the benchmark, or its gradients, on self-attention. NotRun if it is not there."""
    if name.endswith(BACKWARD):
        return _peer_gradients(name)
    short = name.removeprefix("sdpa-")
    found, notes = peers.candidates("cuda")
    candidate = next((c for c in found if c.name == short), None)
    if candidate is None:
        raise NotRun(f"--peer {name}: {'; '.join(notes) or 'there is no such peer'}")

    def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        q, k, v = inputs
        return (candidate.attend(q, k, v, is_causal),)

    return Subject(name, attend, candidate.context, (), _peer_shapes(), outputs=("out",))


def choose(kernels: Sequence[str] | None = None, peer_name: str | None = None) -> list[Subject]:
    """What the command line asks for; NotRun if there is no GPU to run it on, or no such thing."""
    require_gpu()
    return [peer(peer_name)] if peer_name else shipped(kernels)


def by_name(name: str) -> Subject:
    """The subject of that name, in another process than the one that chose it."""
    return peer(name) if name in PEERS else shipped([name])[0]
