"""Runs again what gave no verdict in a stored run: a gate on a kernel that was INVALID or NOT RUN, and a gate that the
run ended before. On the same machine.

A load that ran for too little of the time, or a control that chance did not let be seen, says nothing about a kernel.
What failed is never run again: a second look must not take back a finding.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from .. import registry
from ..verdict import INVALID, NOT_RUN, GateResult, Progress, not_run
from .writer import Refused, require_same_machine


def without_verdict(run: dict[str, Any]) -> dict[str, list[str]]:
    """Executing gate to the kernels of which it has nothing to say; all of them, if the run ended before it. Refused if
    one could not run on any kernel. Machine code can be looked at anywhere: `evidence --gate sass`."""
    found: dict[str, list[str]] = {}
    for gate in (name for name in run["how"]["gates"] if name in registry.EXECUTING):
        if gate not in run:
            found[gate] = list(run["how"]["kernels"])
            continue
        results = [result for result in run[gate] if result["verdict"] in (INVALID, NOT_RUN)]
        if results and len(results) == len(run[gate]):
            raise Refused(f"the gate {gate} gave no verdict on any kernel: run everything again")
        if results:
            found[gate] = [result["subject"] for result in results]
    return found


def run_again(
    run: dict[str, Any],
    environment: dict[str, Any],
    tell: Progress,
    keep: Callable[[dict[str, Any]], None] = lambda renewed: None,
) -> dict[str, Any]:
    """The run with new results in the place of those without a verdict, and a list of them as ``again``. keep: is given
    the run so far after each gate.

    Refused if there is nothing to run again, or if this is another machine or build than the run's. The commit may be
    another: that nothing which takes part has changed, the digests say (``writer.require_made_as_evidence``).
    """
    wanted = without_verdict(run)
    if not wanted:
        raise Refused("the stored run has a verdict of every gate on every kernel")
    require_same_machine([run, {"environment": {**environment, "commit": run["environment"].get("commit")}}])
    from ..subjects import by_name  # needs torch

    renewed = copy.deepcopy(run)
    for gate, names in wanted.items():
        module = importlib.import_module(f"dhp_safe_fa.gates.{gate}.gate")
        subjects = [by_name(name) for name in names]
        able = [subject for subject in subjects if not subject.why_not]
        results: list[GateResult] = module.run(able, gate in run["how"]["quick"], tell) if able else []
        results += [not_run(gate, subject.name, subject.why_not) for subject in subjects if subject.why_not]
        new = {result.subject: result.as_json() for result in results}
        if gate in run:
            renewed[gate] = [new.get(old["subject"], old) for old in run[gate]]
            renewed["again"] = {**renewed.get("again", {}), gate: run.get("again", {}).get(gate, []) + names}
        else:
            renewed[gate] = list(new.values())
        keep(renewed)
    return renewed
