"""What peers mean by the arguments of their gradients, where that is less than the gate `bitwise` asks of ours.

Ours take out and lse as they are given, so that other keys are no matter to a key's gradients, and under the causal
mask query i sees keys 0 to i however many of both there are. A peer may align the mask to the last query and the last
key; one that is reached through autograd computes out and lse itself, so that every key is part of each query; and
cuDNN does not serve a single key, which torch's SDPA says before it calls cuDNN, and the operator that is called here
does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dhp_safe_fa.bench.gradients.peers import OPERATORS

from ..bitwise.rows import Way
from ..inputs import Inputs
from ..subjects import Subject
from ..targets import BACKWARD

# Of the ways to compute rows of keys again (bitwise/key_rows.py), by name: those with other keys, and those in which
# there are as many queries as before and another number of keys, or the reverse.
OTHER_KEYS = re.compile(r"other keys beside|the first \d+ keys|\d+ more keys")
OTHER_LENGTHS = re.compile(r"the first \d+ keys|\d+ more keys|\d+ more queries that add nothing")
# With a single key; under the causal mask also the first row, which is given the keys that it sees.
ONE_KEY, FIRST_ROW = re.compile(r"the first 1 keys"), re.compile(r"the first 1 rows")


def as_meant(peer: Subject) -> Subject:
    """The same peer, asked for what it means, too, and given dense tensors: parts of tensors are copied, because peers
    take the rows of lse for dense. Only gradients are asked for less."""
    if not peer.name.endswith(BACKWARD):
        return peer
    short = peer.name.removeprefix("sdpa-").removesuffix(BACKWARD)
    is_given = short in OPERATORS
    everything: Callable[[Subject, Inputs, Inputs, bool], list[Way]] = peer.ways
    of_dense = peer.attend

    def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        return of_dense(tuple(tensor.contiguous() for tensor in inputs), is_causal)

    def ways(subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
        excluded = ([] if is_given else [OTHER_KEYS]) + ([OTHER_LENGTHS] if is_causal else [])
        if short == "cudnn":
            excluded += [ONE_KEY, FIRST_ROW] if is_causal else [ONE_KEY]
        found = everything(subject, inputs, stranger, is_causal)
        return [way for way in found if not any(names.fullmatch(way.name) for names in excluded)]

    return replace(peer, attend=attend, ways=ways)
