"""Shapes that launch a kernel: tried until the plan answers with it, so a new kernel needs no word here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from .inputs import Shape
from .subjects import REFERENCE
from .tools import NotRun


def _candidates(head_dim: int, dtype: str) -> Iterator[Shape]:
    """Self-attention with every mixture of powers of two, the nearest to the reference first: in how many tiles of
    queries it has, and of keys, else in its sizes. A kernel for long keys is so run with few heads, which keep a GPU as
    busy as many: 16 heads of 16384 rows take eight times as long as two."""
    sizes = product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))

    def distance(size: tuple[int, int, int]) -> tuple[float, float]:
        queries, keys = math.prod(size) / math.prod(REFERENCE), size[-1] / REFERENCE[-1]
        in_sizes = sum(abs(math.log2(a / b)) for a, b in zip(size, REFERENCE, strict=True))
        return abs(math.log2(queries)) + abs(math.log2(keys)), in_sizes

    for batch, heads, seqlen in sorted(sizes, key=distance):
        yield Shape(batch, heads, heads, seqlen, seqlen, head_dim, dtype, False)


def shapes_that(is_launched: Callable[[Shape], bool], kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Four shapes that launch a kernel of ``_inspect.kernels()``: full; causal; grouped heads, as many as the
    reference has if they launch it, too, so that query tiles are dealt in every way; lengths and head_dim that fill no
    tile. NotRun if none was found."""
    name, head_dim, dtype = str(kernel["name"]), int(kernel["head_dim"]), str(kernel["dtype"])
    for full in _candidates(head_dim, dtype):
        odd = replace(full, seqlen_q=full.seqlen_q + 13, seqlen_k=full.seqlen_k + 77, head_dim=head_dim - 8)
        for heads in (max(full.heads_q, REFERENCE[1]), full.heads_q):
            grouped = replace(full, heads_q=heads, heads_k=max(1, heads // 4), is_causal=True)
            shapes = (full, replace(full, is_causal=True), grouped, replace(odd, is_causal=True))
            if all(map(is_launched, shapes)):
                return shapes
    raise NotRun(f"{name}: no shape was found whose plan chooses this kernel")


def few_queries_that(
    is_launched: Callable[[Shape], bool],
    kernel: dict[str, Any],
    heads: tuple[int, ...],
    lengths: tuple[int, ...],
    together: int = 8,
) -> tuple[Shape, ...]:
    """The same of one query over many keys: a head alone; grouped heads; several queries, of so many heads that share
    keys; lengths and head_dim that fill no tile. None is causal: a mask without an offset would leave the queries few
    keys."""
    name, head_dim, dtype = str(kernel["name"]), int(kernel["head_dim"]), str(kernel["dtype"])
    for count, seqlen in product(heads, lengths):
        full = Shape(1, count, count, 1, seqlen, head_dim, dtype, False)
        grouped, several = replace(full, heads_q=8 * count), replace(full, heads_q=together * count, seqlen_q=3)
        odd = replace(full, seqlen_k=seqlen - 77, head_dim=head_dim - 8)
        shapes = (full, grouped, several, odd)
        if all(map(is_launched, shapes)):
            return shapes
    raise NotRun(f"{name}: no shape was found whose plan chooses this kernel")
