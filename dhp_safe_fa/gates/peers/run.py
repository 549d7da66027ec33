"""The peers under the same gates: ``python -m dhp_safe_fa.gates peers`` writes audits/peers.json and audits/peers.md.

The run (a Hopper GPU) and the page (anywhere, from the stored JSON: page.py) are separate.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa.bench.gradients.peers import our_gradients
from dhp_safe_fa.bench.gradients.reference import errors
from dhp_safe_fa.bench.peers import one_line, ours

from .. import controls, report, subjects
from ..evidence.writer import compact
from ..inputs import Inputs, Shape
from ..registry import EXECUTING, NAMES
from ..sass import policy
from ..subjects import Subject
from ..tools import NotRun
from ..verdict import FAIL, INVALID, NOT_RUN, PASS, Progress, have_a_say, not_run
from . import code
from .conventions import as_meant
from .process import in_a_process, said

SCHEMA = "dhp_safe_fa.peers/2"
POLICY = Path(__file__).resolve().parents[3] / "audits" / "peers_policy.json"
# ‖theirs − ours‖ / ‖ours‖ on normal inputs, in bfloat16. Right ones are less than 0.006 apart, because in the
# benchmark's stored runs theirs are within 0.0031 of float64 and ours within 0.0025; the mildest wrong layout of those
# tried, other rows of out given to gradients over 1024 keys, puts dq 0.14 away and dk 0.07.
TOLERANCE = 0.02


def _of_ours(inputs: Inputs, is_causal: bool, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """What this package computes of a peer's inputs."""
    if outputs == ("out",):
        q, k, v = inputs
        return (ours(q, k, v, is_causal),)
    q, k, v, out, lse, grad_out, _ = inputs  # no peer has an lse to differentiate
    return our_gradients(q, k, v, out, lse, grad_out, is_causal)


def require_right(peer: Subject, shape: Shape, inputs: Inputs, found: Sequence[Tensor]) -> None:
    """NotRun if the peer found something else of these inputs than what this package computes."""
    expected = _of_ours(inputs, shape.is_causal, peer.outputs)
    for name, right, one in zip(peer.outputs, expected, found, strict=True):
        wrong = f"{peer.name} is wrong on {shape}: {name}"
        if one.shape != right.shape:
            raise NotRun(f"{wrong} is {list(one.shape)} where it should be {list(right.shape)}")
        error, _ = errors(right.double(), one)
        if not error <= TOLERANCE:
            raise NotRun(f"{wrong} has relative error {error:.2g} against ours, allowed {TOLERANCE}")


def kernels_seen(subject: Subject) -> list[str]:
    """Names of all kernels that the subject's calls launch, as torch's profiler prints them. NotRun if a call fails, or
    computes something else than attention."""
    from torch.profiler import ProfilerActivity, profile

    data = [subject.make("normal", shape, 0, "cuda") for shape in subject.shapes]
    try:
        with subject.context(), profile(activities=[ProfilerActivity.CUDA]) as seen:
            found = [subject.attend(one, shape.is_causal) for shape, one in zip(subject.shapes, data, strict=True)]
            torch.cuda.synchronize()
    except Exception as error:  # a peer's own, whatever it is
        raise NotRun(f"{subject.name} does not serve the shapes of this audit: {one_line(error)}") from error
    for shape, inputs, outputs in zip(subject.shapes, data, found, strict=True):
        require_right(subject, shape, inputs, outputs)
    return sorted({event.name for event in seen.events() if event.device_type.name == "CUDA"})


def run(names: Sequence[str], tell: Progress, gates: Sequence[str] = NAMES) -> dict[str, Any]:
    """These gates, quick, on these peers (of targets.PEERS). NotRun without a Hopper GPU; a peer that is not there, or
    a gate that cannot run, is a result. Each says on which shapes, and in which of "runs": here the only one."""
    subjects.require_gpu()
    found: dict[str, Any] = {"schema": SCHEMA, "runs": [report.environment()], "peers": {}}
    present: dict[str, tuple[list[str], list[str]]] = {}  # its shapes, and the kernels seen
    for number, name in enumerate(names):
        tell(f"{name}: one call of each shape", number, len(names))
        try:
            subject = subjects.peer(name)
            seen = kernels_seen(subject)
        except NotRun as error:
            where = {"run": 0, "shapes": []}
            found["peers"][name] = {gate: {**compact(not_run(gate, name, error).as_json()), **where} for gate in gates}
            continue
        present[name] = ([str(shape) for shape in subject.shapes], seen)
        found["peers"][name] = {}
    for gate in gates if present else ():
        if gate in EXECUTING:
            results = _executing(gate, list(present), tell)
        else:
            results = _sass({name: seen for name, (_, seen) in present.items()}, tell)
        for name, result in results.items():
            found["peers"][name][gate] = {**result, "run": 0, "shapes": present[name][0]}
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
            result = {**code.audit_peer(name, kernels, rules), "kernels_seen": list(kernels), "problems": wrong}
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
    """What several runs found, say one for each peer or gate, as one: the last verdict on a peer in a gate counts. One
    that says nothing (NOT RUN, INVALID) takes no place of one that does."""
    runs: list[dict[str, Any]] = []
    peers: dict[str, dict[str, dict[str, Any]]] = {}
    for content in contents:
        for name, results in content["peers"].items():
            known = peers.setdefault(name, {})
            for gate, result in results.items():
                if result["verdict"] in (PASS, FAIL) or known.get(gate, result)["verdict"] not in (PASS, FAIL):
                    known[gate] = {**result, "run": result["run"] + len(runs)}
        runs += content["runs"]
    every = [result for results in peers.values() for result in results.values()]
    in_use = sorted({result["run"] for result in every})
    for result in every:
        result["run"] = in_use.index(result["run"])
    return {"schema": SCHEMA, "runs": [runs[number] for number in in_use], "peers": peers}
