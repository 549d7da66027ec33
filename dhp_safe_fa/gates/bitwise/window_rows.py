"""Row invariance under a sliding window, of kernels that have one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..inputs import Inputs
from .compare import Outputs, kept
from .forms import A_CALL
from .rows import ROWS, Side, Way, company, part

if TYPE_CHECKING:  # a subject knows its ways
    from ..subjects import Subject

# (left, right): less than a tile of keys, and more than one; causal calls have nothing on the right.
WINDOWS = ((70, 0), (200, 40))


def window_ways(
    subject: Subject,
    attend: Callable[..., Outputs],
    inputs: Inputs,
    stranger: Inputs,
    is_causal: bool,
    windows: tuple[tuple[int, int], ...] = WINDOWS,
) -> list[Way]:
    """The ways to compute rows that see a window of keys.

    Args:
        attend: (inputs, is_causal, window) -> out and lse by the kernel under test.
    """
    ways = []
    for window in windows:
        whole = kept(attend(inputs, is_causal, window=window))
        of = Side(subject.outputs, partial(attend, window=window), None, False)
        found = [*company(of, inputs, stranger, is_causal, whole)]
        for name, form in subject.forms.items():
            found.append(Way(f"as {name}", partial(form, inputs, stranger, is_causal, window=window), whole))
        call = subject.forms[A_CALL]
        for rows in (rows for rows in ROWS if rows <= inputs[0].size(2)):
            last = slice(-rows, None)
            place = {"causal_offset": inputs[0].size(2) - rows, "window": window}
            chunk = partial(call, part(inputs, last), stranger, is_causal, **place)
            found.append(Way(f"the last {rows} rows", chunk, of.cut(whole, 2, last)))
        ways += [Way(f"window {window}: {way.name}", way.compute, way.expected) for way in found]
    return ways
