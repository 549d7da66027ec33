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
    """With a cluster's rows for each key head, or fewer: a plan looks at how many clusters there are."""

    def is_launched(shape: Shape) -> bool:
        return forward.planned(shape) == str(kernel["name"])

    return few_queries_that(is_launched, kernel, (8, 4, 2, 1), (2048, 4096, 1024, 8192), together=2)


def subject(kernel: dict[str, Any]) -> Subject:
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    shapes = shapes_of(kernel)
    return Subject(name, forward.attend, nullcontext, (name,), shapes, sha256, forward.attend_offset, forms=FORMS)
