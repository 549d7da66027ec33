"""What all ranks have to give alike: compared before anything else travels, so that a mistake is an error on every rank
and neither a wrong result nor a wait for whoever went another way.

A call sends a row of integers and receives those of the others. A rank that has refused its arguments sends that, too.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

# What a row has room for: the widest call sends twenty-four numbers.
WORDS = 24
# The first numbers of a row.
CALLS = ("attention", "attention_lse", "attention_varlen", "attention_varlen_lse", "unshard", "backward")
# Dtypes travel as their place here.
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


class Fact(NamedTuple):
    """A number that is the same on all ranks, what it is, and how a message shows it."""

    what: str
    value: int
    show: Callable[[int], str] = str


def dtype_fact(what: str, dtype: torch.dtype) -> Fact:
    return Fact(what, DTYPES.index(dtype), lambda place: str(DTYPES[place]).removeprefix("torch."))


def number_fact(what: str, value: float | None) -> Fact:
    """A float64, sent as an integer of its bits; NaN, which no call has, is None."""
    (bits,) = struct.unpack("<q", struct.pack("<d", math.nan if value is None else value))
    return Fact(what, int(bits), _shown)


def _shown(bits: int) -> str:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return "None" if math.isnan(value) else f"{value:g}"


def digest_fact(what: str, numbers: Sequence[int]) -> Fact:
    """Of more numbers than a row has room for: the first 64 bits of their SHA-256."""
    hashed = hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).digest()
    (bits,) = struct.unpack("<q", hashed[:8])
    return Fact(what, int(bits), lambda sent: f"(SHA-256) {struct.pack('<q', sent).hex()}")


def yes_or_no(what: str, value: bool) -> Fact:
    return Fact(what, int(value), lambda number: str(bool(number)))


def refuse(call: str, sentence: str) -> NoReturn:
    raise RuntimeError(f"ContextParallel.{call}: {sentence}")


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors there."""
    return device.type in [own.type for own in group._device_types]


def _meeting_device(group: dist.ProcessGroup, given: Sequence[object]) -> torch.device:
    """Where a rank sends its row from: the CPU if the group serves it, because there nobody waits for what a GPU still
    has to do; else the device of the first tensor among what was given that it serves."""
    cpu = torch.device("cpu")
    fitting = (t.device for t in given if isinstance(t, torch.Tensor) and serves(group, t.device))
    return cpu if serves(group, cpu) else next(fitting, group._device_types[0])


def agree(
    group: dist.ProcessGroup,
    given: Sequence[object],
    call: str,
    facts: Sequence[Fact],
    lengths: Sequence[int],
    refused: bool = False,
) -> list[list[int]]:
    """Compares the facts, and returns the lengths of every rank.

    Args:
        group: who takes part.
        given: what the call was given, on its device if it is right.
        call: one of CALLS.
        facts: the same on all ranks; none if refused.
        lengths: what may differ.
        refused: this rank has an error to raise; it does so after this.

    Raises:
        RuntimeError: on every rank, if a fact differs, another call was made, or another rank refused its arguments.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = [int(refused), CALLS.index(call), *(fact.value for fact in facts), *lengths]
    row = mine + [0] * (WORDS - len(mine))
    # To each rank directly: gloo's all-gather hands rows from one rank to the next, which takes as many turns as ranks.
    sent = torch.tensor(row * ranks, dtype=torch.int64, device=_meeting_device(group, given))
    gathered = torch.empty_like(sent)
    dist.all_to_all_single(gathered, sent, group=group)
    rows: list[list[int]] = gathered.view(ranks, WORDS).tolist()
    if refused:
        return []
    for other, theirs in enumerate(rows):
        if theirs[0]:
            refuse(call, f"rank {other} refused its arguments, with an error of its own")
        if theirs[1] != mine[1]:
            refuse(call, f"called here, on rank {rank}, while rank {other} called {CALLS[theirs[1]]}")
        for fact, value in zip(facts, theirs[2:], strict=False):
            if value != fact.value:
                here, there = fact.show(fact.value), fact.show(value)
                sentence = f"{here} here, on rank {rank}, and {there} on rank {other}; all ranks must give the same"
                refuse(call, f"{fact.what} {sentence}")
    return [theirs[2 + len(facts) :][: len(lengths)] for theirs in rows]
