"""The kernel families that the loop can measure: a new one is an entry here, and nothing else asks which it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dhp_safe_fa.bench import Case
from dhp_safe_fa.burn.builds.library import Library
from dhp_safe_fa.burn.log.records import FORWARD, Chip
from dhp_safe_fa.burn.measuring import chip


@dataclass(frozen=True)
class Family:
    """What a run calls and compares. A call is one launch: that is how a profile is read (measuring/profiling.py).

    Attributes:
        call: of a build, as bench times it: (q, k, v, is_causal) -> out.
        launch: what a call of a shape launches, in words that are equal if the launches are. ValueError if the build
            does not serve the shape.
        floors: under the time of a call on a chip.
    """

    call: Callable[[Library], Callable[[Tensor, Tensor, Tensor, bool], Tensor]]
    launch: Callable[[Library, Case], str]
    floors: Callable[[Case, Chip], chip.Floors]


FAMILIES = {
    FORWARD: Family(lambda build: build.attend, lambda build, case: build.launch(case), chip.floors),
}
