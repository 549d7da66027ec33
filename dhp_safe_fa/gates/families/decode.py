"""Few queries over many keys under test: the forward's calls, on shapes whose plan answers with a decode kernel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..bitwise.forms import FORMS
from ..inputs import Shape
from ..shapes import few_queries_that
from ..subjects import Subject
from . import forward


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    name = str(kernel["name"])
    lengths = (2048, 4096, 1024, 8192)
    return few_queries_that(lambda shape: forward.planned(shape) == name, kernel, (8, 4, 2, 1), lengths)


def subject(kernel: dict[str, Any]) -> Subject:
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    shapes = shapes_of(kernel)
    return Subject(name, forward.attend, nullcontext, (name,), shapes, sha256, forward.attend_offset, forms=FORMS)
