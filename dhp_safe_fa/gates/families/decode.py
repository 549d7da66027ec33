"""Few queries over many keys under test: the forward's calls, on shapes whose plan answers with a decode kernel."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

from ..bitwise.forms import FORMS
from ..inputs import Shape
from ..subjects import Subject
from ..tools import NotRun
from . import forward


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """One query over many keys: a head alone; grouped heads; several queries; lengths and head_dim that fill no tile.
    Each has a cluster's rows for each key head, or fewer: a plan looks at how many clusters there are. None is causal:
    a mask without an offset would leave the queries few keys."""
    name, head_dim, dtype = str(kernel["name"]), int(kernel["head_dim"]), str(kernel["dtype"])
    for count, seqlen in product((8, 4, 2, 1), (2048, 4096, 1024, 8192)):
        full = Shape(1, count, count, 1, seqlen, head_dim, dtype, False)
        grouped, several = (replace(full, heads_q=n * count, seqlen_q=rows) for n, rows in ((8, 1), (2, 3)))
        shapes = full, grouped, several, replace(full, seqlen_k=seqlen - 77, head_dim=head_dim - 8)
        if all(forward.planned(shape) == name for shape in shapes):
            return shapes
    raise NotRun(f"{name}: no shape was found whose plan chooses this kernel")


def subject(kernel: dict[str, Any]) -> Subject:
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    shapes = shapes_of(kernel)
    return Subject(name, forward.attend, nullcontext, (name,), shapes, sha256, forward.attend_offset, forms=FORMS)
