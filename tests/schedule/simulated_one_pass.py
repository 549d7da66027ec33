"""The backward in one pass in the simulator, and mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace

from simulated import Mutation
from simulated_backward import BACKWARD

MUTATIONS = (
    Mutation("rows_not_poisoned", (("poison = arrived ? 0.f : NAN;", "poison = 0.f;"),), time_outs=True),
)

ONE_PASS = replace(BACKWARD, source="one_pass.cu", mutations=MUTATIONS)
