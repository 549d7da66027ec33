"""The kernel families that the loop can measure: a new one is an entry here, and nothing else asks which it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dhp_safe_fa.bench import Case, directions
from dhp_safe_fa.bench.directions import Direction
from dhp_safe_fa.bench.gradients import peers
from dhp_safe_fa.burn.builds.library import Library
from dhp_safe_fa.burn.log.records import BACKWARD, FORWARD, Chip
from dhp_safe_fa.burn.measuring import chip


@dataclass(frozen=True)
class Family:
    """What a run calls and compares.

    Attributes:
        direction: of its cases and peers.
        call: of a build, what a candidate of that direction is.
        launch: what a call of a shape launches, in words that are equal if the launches are. ValueError if the build
            does not serve the shape.
        floors: under the time of a call on a chip.
        entries: names of the functions that a call launches, in its order; the first comes once at most. That is how a
            profile is read (measuring/profiling.py).
        default_shapes: what is timed if nothing is said.
    """

    direction: Direction
    call: Callable[[Library], Callable[..., Any]]
    launch: Callable[[Library, Case], str]
    floors: Callable[[Case, Chip], chip.Floors]
    entries: tuple[str, ...]
    default_shapes: tuple[str, ...]


FAMILIES = {
    FORWARD: Family(
        directions.FORWARD,
        lambda build: build.attend,
        lambda build, case: build.launch(case),
        chip.floors,
        ("dhp_attention_fwd",),
        ("start", "sweep"),
    ),
    BACKWARD: Family(
        directions.BACKWARD,
        lambda build: peers.direct(build.differentiate),
        lambda build, case: build.launch_backward(case),
        chip.floors,
        ("dhp_attention_bounds", "dhp_attention_delta", "dhp_attention_bwd", "dhp_attention_dq_out"),
        ("anchors",),
    ),
}
