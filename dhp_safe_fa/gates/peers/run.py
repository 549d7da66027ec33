"""The peers under the same gates: ``python -m dhp_safe_fa.gates peers`` writes audits/peers.json and audits/peers.md.

The run (a Hopper GPU) and the page (anywhere, from the stored JSON: page.py) are separate.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhp_safe_fa.bench.peers import one_line

from .. import controls, report, subjects
from ..evidence.writer import compact
from ..registry import EXECUTING, NAMES
from ..sass import policy
from ..subjects import Subject
from ..tools import NotRun
from ..verdict import INVALID, NOT_RUN, Progress, have_a_say, not_run
from . import code
from .process import in_a_process, said
from .terms import as_meant

SCHEMA = "dhp_safe_fa.peers/2"
POLICY = Path(__file__).resolve().parents[3] / "audits" / "peers_policy.json"


def kernels_seen(subject: Subject) -> list[str]:
    """Names of all kernels that the subject's calls launch, as torch's profiler prints them. NotRun if a call fails."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    data = [subject.make("normal", shape, 0, "cuda") for shape in subject.shapes]
    try:
        with subject.context(), profile(activities=[ProfilerActivity.CUDA]) as seen:
            for shape, inputs in zip(subject.shapes, data, strict=True):
                subject.attend(inputs, shape.is_causal)
            torch.cuda.synchronize()
    except Exception as error:  # a peer's own, whatever it is
        raise NotRun(f"{subject.name} does not serve the shapes of this audit: {one_line(error)}") from error
    return sorted({event.name for event in seen.events() if event.device_type.name == "CUDA"})


def run(names: Sequence[str], tell: Progress, gates: Sequence[str] = NAMES) -> dict[str, Any]:
    """These gates, quick, on these peers (of targets.PEERS). NotRun without a Hopper GPU; a peer that is not there, or
    a gate that cannot run, is a result. Every result says in which of "runs" it was made: here the only one."""
    subjects.require_gpu()
    found: dict[str, Any] = {"schema": SCHEMA, "runs": [report.environment()], "peers": {}}
    present = []
    for number, name in enumerate(names):
        tell(f"{name}: one call of each shape", number, len(names))
        try:
            subject = subjects.peer(name)
            seen = kernels_seen(subject)
        except NotRun as error:
            absent = {gate: {**compact(not_run(gate, name, error).as_json()), "run": 0} for gate in gates}
            found["peers"][name] = {"shapes": [], "kernels_seen": [], **absent}
            continue
        present.append(subject)
        shapes = [str(shape) for shape in subject.shapes]
        found["peers"][name] = {"shapes": shapes, "kernels_seen": seen}
    names = [subject.name for subject in present]
    for gate in gates if present else ():
        if gate in EXECUTING:
            results = _executing(gate, names, tell)
        else:
            results = _sass({name: found["peers"][name]["kernels_seen"] for name in names}, tell)
        for name, result in results.items():
            found["peers"][name][gate] = {**result, "run": 0}
    return found


def _sass(seen: Mapping[str, Sequence[str]], tell: Progress) -> dict[str, dict[str, Any]]:
    """The machine code of the kernels seen of each peer, after the controls."""
    try:
        outcomes = controls.run_controls(controls.load_controls())
        rules = policy.load(POLICY)
        wrong = [f"control {outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem]
        if not wrong and not have_a_say(outcomes):
            wrong = ["no control had to be caught"]
    except (NotRun, controls.ControlError, policy.PolicyError) as error:
        return {name: {"verdict": NOT_RUN, "kernels": [], "problems": [str(error)]} for name in seen}
    found = {}
    for number, (name, kernels) in enumerate(seen.items()):
        tell(f"sass: {name}", number, len(seen))
        try:
            result = {**code.audit_peer(name, kernels, rules), "problems": wrong}
        except NotRun as error:
            result = {"verdict": NOT_RUN, "kernels": [], "problems": [str(error)]}
        found[name] = {**result, "verdict": INVALID} if wrong else result
    return found


def _judge(gate: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One gate over these peers, so that its controls run once."""
    present = [as_meant(subjects.peer(name)) for name in names]
    results = importlib.import_module(f"dhp_safe_fa.gates.{gate}.gate").run(present, True, lambda *_: None)
    return {result.subject: compact(result.as_json()) for result in results}


def _executing(gate: str, names: Sequence[str], tell: Progress) -> dict[str, dict[str, Any]]:
    """The same in a process of its own; where a peer ends that, fails on an input that it refuses, or cannot be looked
    at, each alone."""
    tell(f"{gate}: {', '.join(names)}", 0, 1)
    try:
        return in_a_process(_judge, gate, names)
    except Exception as error:  # a peer's own, whatever it is: spare the others
        if len(names) > 1:
            return {name: one for single in names for name, one in _executing(gate, [single], tell).items()}
        return {names[0]: compact(not_run(gate, names[0], said(error)).as_json())}


def merge(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several runs found, say one for each peer or gate, as one: the last word on a peer in a gate counts."""
    runs: list[dict[str, Any]] = []
    peers: dict[str, dict[str, Any]] = {}
    for content in contents:
        for name, peer in content["peers"].items():
            known = peers.setdefault(name, {})
            known.update(peer)
            known.update({gate: {**peer[gate], "run": peer[gate]["run"] + len(runs)} for gate in NAMES if gate in peer})
        runs += content["runs"]
    results = [peer[gate] for peer in peers.values() for gate in NAMES if gate in peer]
    in_use = sorted({result["run"] for result in results})
    for result in results:
        result["run"] = in_use.index(result["run"])
    return {"schema": SCHEMA, "runs": [runs[number] for number in in_use], "peers": peers}
