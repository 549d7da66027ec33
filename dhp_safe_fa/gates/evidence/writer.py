"""Makes audits/evidence.json of what the gates said: by kernel, with its hashes, so that each claim names its binary.

A run is what ``gates all --json`` writes. One run over all kernels, or several, of some kernels or gates each, make one
evidence file, which also keeps what it said before of kernels that are the same bytes still.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhp_safe_fa import evidence
from dhp_safe_fa._files import write_whole

from .. import provenance, registry, tools
from ..verdict import FAIL, INVALID, NOT_RUN, PASS, worst

ROOT = evidence.CHECKOUT.parents[1]
# What the kernels, their build and the gates are made of; documents and stored results may differ from the commit.
SOURCES = ("csrc", "setup.py", "dhp_safe_fa", "tests/controls", "audits/sass_policy.json")
QUICK_IS_EVIDENCE = tuple(gate.name for gate in registry.GATES if gate.quick_is_evidence)
# 84 kernels with a run for each: 475 kB.
MAX_BYTES = 600_000
# A gate's nested figure that is longer than the limit is left to the run's own JSON. The first of these limits is taken
# that keeps the file below MAX_BYTES.
_NESTED_LIMITS = (8_000, 4_000, 2_000, 1_000, 0)
_MAX_PROBLEMS = 8
# Only the run's own JSON has the percentiles of a distribution, and the single classes beside their spread.
_BULK = ("percentiles_ns", "by_class")


class Refused(Exception):
    """Why there can be no evidence; the text is one sentence."""


def require_clean_build(kernels: dict[str, str], dirty: bool | None, built: str) -> None:
    """Refused unless the kernels (name to SHA-256) are those that the commit's sources were built into last.

    Args:
        dirty: whether SOURCES differ from the commit; None where there is no git to ask.
        built: the digest that the build carries of its sources.
    """
    if not kernels:
        raise Refused("this build holds no GPU kernel: build it where nvcc is")
    if dirty is None and (ROOT / ".git").exists():
        raise Refused("git does not say whether the sources are those of the commit: ask `git status` why")
    if dirty:
        raise Refused(f"sources differ from the commit ({', '.join(SOURCES)}): commit them first, then build")
    if not (ROOT / "setup.py").exists():
        raise Refused("an installed package has no sources for evidence to be bound to: use a checkout")
    if provenance.of_all_sources(ROOT) != built:
        raise Refused("csrc/ or setup.py have changed since the library was built from them: run `make build`")
    for name, sha256 in kernels.items():
        cubin = ROOT / "build" / "cubins" / f"{name}.cubin"
        if not cubin.is_file() or hashlib.sha256(cubin.read_bytes()).hexdigest() != sha256:
            raise Refused(f"{name}: the library holds another cubin than build/cubins/: run `make build`")


def assemble(
    runs: Sequence[dict[str, Any]],
    kernels: Sequence[dict[str, Any]],
    listings: Mapping[str, str],
    now: Mapping[str, str | None],
    before: evidence.Evidence | None = None,
) -> dict[str, Any]:
    """The evidence file's content.

    Args:
        runs: what ``gates all --json`` wrote, each of some of the kernels and gates.
        kernels: what this build holds (``_inspect.kernels()``).
        listings: by kernel, the SHA-256 of its disassembly; of those in the runs.
        now: digests of what takes part in verdicts (``provenance.here()``).
        before: what is stored until now. It stays true of kernels that are the same bytes, until a gate has a verdict
            on them anew; but a FAIL is not taken back by a PASS in which the very same has taken part: that is left
            out (``not_taken_back``).

    Raises:
        Refused: a run has other kernels than the build, or no Hopper GPU where a gate needs one, or was made in another
            way than `make evidence` would, or two runs have a result of the same gate on the same kernel.
    """
    for run in runs:
        require_made_as_evidence(run, kernels, now)
    failed = findings(before)
    entries = {kernel["name"]: _entry(kernel, listings, runs, now, before, failed) for kernel in kernels}
    heads = [*map(_head, runs), *(before.runs if before else ())]
    used = sorted({gate["run"] for entry in entries.values() for gate in entry["gates"].values()})
    for entry in entries.values():
        for gate in entry["gates"].values():
            gate["run"] = used.index(gate["run"])
    known = {name: entry for name, entry in entries.items() if entry["gates"]}
    heads = [_with_what_took_part(heads[place], known, index) for index, place in enumerate(used)]
    for limit in _NESTED_LIMITS:
        content = {
            "schema": evidence.SCHEMA,
            "runs": heads,
            "kernels": {name: _shortened(entry, limit) for name, entry in known.items()},
            "failed": failed,
        }
        if len(as_text(content)) <= MAX_BYTES:
            break
    return content


def not_taken_back(
    runs: Sequence[dict[str, Any]],
    kernels: Sequence[dict[str, Any]],
    now: Mapping[str, str | None],
    before: evidence.Evidence | None,
) -> list[tuple[str, str]]:
    """Kernel and gate of each PASS in these runs that `assemble` leaves out. A second look takes no finding back."""
    failed = findings(before)
    return [
        (kernel["name"], gate)
        for kernel in kernels
        for gate in registry.NAMES
        for run in runs
        if kernel["name"] in run["how"]["kernels"] and gate in run
        if _result(gate, kernel, run)["verdict"] == PASS and has_failed(failed, kernel, gate, now)
    ]


def _head(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored of a run beside the verdicts. Kernels have their hashes there."""
    environment = {key: value for key, value in run["environment"].items() if key != "kernels"}
    return {
        "environment": environment,
        "quick": run["how"]["quick"],
        "digests": run["how"]["digests"],
        "sha256": digest(run),
    }


def _with_what_took_part(head: Mapping[str, Any], entries: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The run without digests of what took part in no verdict that is stored of it; with all if one is a FAIL, which is
    to be remembered though a gate should need more. index: its place among the runs."""
    stored = [
        (name, entry["family"], gate, result["verdict"])
        for name, entry in entries.items()
        for gate, result in entry["gates"].items()
        if result["run"] == index
    ]
    if any(verdict == FAIL for *_, verdict in stored):
        return dict(head)
    parts = {part for name, family, gate, _ in stored for part in registry.gate(gate).took_part(name, family)}
    return {**head, "digests": {part: digest for part, digest in head["digests"].items() if part in parts}}


def require_made_as_evidence(
    run: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]], now: Mapping[str, str | None]
) -> None:
    """Refused if a run was made in a way in which `make evidence` makes none, or with other kernels or other parts than
    those of now."""
    how = run.get("how")
    said = {"kernels": list, "gates": list, "quick": list, "sources": dict, "digests": dict}
    if not isinstance(how, dict) or not all(isinstance(how.get(key), kind) for key, kind in said.items()):
        raise Refused("a run does not say how it was made, as those of this version do: run the gates again")
    if not how["kernels"]:
        raise Refused(f"a run is about {how.get('subjects')}, and not about the shipped kernels")
    family_of = {kernel["name"]: kernel["family"] for kernel in kernels}
    held = {kernel["name"]: kernel["cubin_sha256"] for kernel in kernels}
    measured = run["environment"].get("kernels", {})
    if any(name not in held or measured.get(name) != held[name] for name in how["kernels"]):
        raise Refused("the run was made with other kernels than this build holds")
    if set(how["gates"]) & set(registry.EXECUTING) and not run["environment"].get("gpu"):
        raise Refused("this was run without a GPU: the gates need a Hopper GPU")
    if how["sources"].get("dirty"):
        raise Refused("a run was made with sources that differ from the commit that it names")
    if how["sources"].get("built") is None or how["sources"].get("built") != how["sources"].get("here"):
        raise Refused("a run was made with a library that was not built from the sources of the commit that it names")
    hasty = [gate for gate in how["quick"] if gate not in QUICK_IS_EVIDENCE]
    if hasty:
        raise Refused(f"{', '.join(hasty)}: run with --quick, and evidence needs all of its repeats")
    if how["digests"].get("policy") != now["policy"]:
        raise Refused("a run was made with another policy than audits/sass_policy.json")
    took_part = {
        part
        for name in how["kernels"]
        for gate in how["gates"]
        for part in registry.gate(gate).took_part(name, family_of[name])
    }
    changed = [part for part in now if part in took_part and how["digests"].get(part) != now[part]]
    if changed:
        raise Refused(f"a run was made with another {', another '.join(changed)} than this checkout has: run it again")


def digest(content: Any) -> str:
    """SHA-256 of a JSON value, whatever its spacing and order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def listing_digest(cubin: bytes) -> str:
    """SHA-256 of the disassembly that the gate sass reads, by CUDA 13's nvdisasm: another may print it otherwise."""
    return hashlib.sha256(tools.disassemble(cubin).encode()).hexdigest()


def _entry(
    kernel: Mapping[str, Any],
    listings: Mapping[str, str],
    runs: Sequence[Mapping[str, Any]],
    now: Mapping[str, str | None],
    before: evidence.Evidence | None,
    failed: Findings,
) -> dict[str, Any]:
    """Of one kernel. The place of a gate's run is one among the runs, and then those of before."""
    name, sha256 = kernel["name"], kernel["cubin_sha256"]
    known = before.kernels.get(name, {}) if before else {}
    old = known.get("gates", {}) if known.get("cubin_sha256") == sha256 else {}
    gates: dict[str, Any] = {}
    for gate in registry.NAMES:
        found = [
            {**_result(gate, kernel, run), "run": index}
            for index, run in enumerate(runs)
            if name in run["how"]["kernels"] and gate in run
        ]
        if len(found) > 1:
            raise Refused(f"{name}: the gate {gate} has {len(found)} results in these runs; one can be stored")
        stays = gate in old and before is not None and bool(found) and _stays(before, name, gate, found[0], now)
        is_no_news = bool(found) and found[0]["verdict"] == PASS and has_failed(failed, kernel, gate, now)
        if found and not stays and not is_no_news:
            gates[gate] = found[0]
        elif gate in old:
            gates[gate] = {**old[gate], "run": old[gate]["run"] + len(runs)}
    return {
        "family": kernel["family"],
        "cubin_sha256": sha256,
        "listing_sha256": listings.get(name, known.get("listing_sha256")),
        "registers": kernel["registers"],
        "spill_bytes": kernel["spill_bytes"],
        "gates": gates,
    }


def _stays(
    before: evidence.Evidence, name: str, gate: str, new: Mapping[str, Any], now: Mapping[str, str | None]
) -> bool:
    """Whether a stored result stays, since the new one says nothing."""
    if new["verdict"] not in (INVALID, NOT_RUN):
        return False
    old = before.verdict(name, gate)
    return old == FAIL or (old not in (INVALID, NOT_RUN) and not before.outdated(name, gate, now))


# By cubin and gate each finding that was ever stored: the digests of what may have taken part, needed today or not.
Findings = dict[str, dict[str, list[dict[str, "str | None"]]]]


def findings(before: evidence.Evidence | None) -> Findings:
    """Those that are remembered, and those that are the verdict today."""
    if before is None:
        return {}
    failed = copy.deepcopy(before.failed)
    for name, entry in before.kernels.items():
        for gate, result in entry["gates"].items():
            if result["verdict"] == FAIL:
                digests = before.runs[result["run"]]["digests"].items()
                of = ("", name, entry["family"], gate)
                then = {part: digest for part, digest in digests if part.partition(" ")[2] in of}
                known = failed.setdefault(entry["cubin_sha256"], {}).setdefault(gate, [])
                known += [then] if then not in known else []
    return failed


def has_failed(
    failed: Findings,
    kernel: Mapping[str, Any],
    gate: str,
    now: Mapping[str, str | None],
) -> bool:
    """Whether the gate has failed on these bytes with all taking part that takes part now."""
    took_part = registry.gate(gate).took_part(kernel["name"], kernel["family"])
    known = failed.get(kernel["cubin_sha256"], {}).get(gate, ())
    return any(all(then.get(part) == now.get(part) for part in took_part) for then in known)


def _result(gate: str, kernel: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """What a run in which the gate has run on the kernel says of it."""
    read = _sass if gate == "sass" else _executed
    return read(gate, kernel["name"], kernel["cubin_sha256"], run)


def _executed(gate: str, name: str, sha256: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a gate on a kernel. One that could not run at all speaks of all kernels at once."""
    results = [result for result in run[gate] if result["subject"] == name]
    results = results or [result for result in run[gate] if result["verdict"] == NOT_RUN]
    if len(results) != 1:
        raise Refused(f"{name}: {len(results)} results of the gate {gate} in a run of it; one is needed")
    return compact(results[0])


def _sass(gate: str, name: str, sha256: str, run: Mapping[str, Any]) -> dict[str, Any]:
    reports = [report for report in run[gate] if report.get("kernel") == name]
    stopped = [report for report in run[gate] if "kernel" not in report and report["verdict"] == NOT_RUN]
    if not reports and stopped:
        return compact(stopped[0])
    if len(reports) != 1 or reports[0]["cubin_sha256"] != sha256:
        raise Refused(f"{name}: {len(reports)} results of the gate sass about this cubin; one is needed")
    (report,) = reports
    figures = {key: report[key] for key in ("instructions", "predicated_branches", "indirect_branches")}
    figures["secret_findings"] = len(report["secret_findings"])
    return {"verdict": report["verdict"], "figures": figures, "problems": report["unknown_opcodes"]}


def compact(result: Mapping[str, Any]) -> dict[str, Any]:
    """A gate's result (GateResult as JSON) without bulk: controls are counted; opcodes, which have a counter each, are
    left to their total; a nested figure that no file has a place for is left out, and named."""
    problems = result["problems"]
    kept: dict[str, Any] = {
        "verdict": result["verdict"],
        "figures": {key: _brief(value) for key, value in result["figures"].items()},
        "problems": problems[:_MAX_PROBLEMS],
    }
    if len(problems) > _MAX_PROBLEMS:
        kept["more_problems"] = len(problems) - _MAX_PROBLEMS
    controls = result["controls"]
    kept["controls"] = {"right": sum(not control["problem"] for control in controls), "of": len(controls)}
    return _without_bulk(kept, _NESTED_LIMITS[0])


def _shortened(entry: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """A kernel's entry without nested figures of more than ``limit`` bytes."""
    return {**entry, "gates": {gate: _without_bulk(result, limit) for gate, result in entry["gates"].items()}}


def _without_bulk(result: Mapping[str, Any], limit: int) -> dict[str, Any]:
    figures = result["figures"]
    large = [
        key for key, value in figures.items() if isinstance(value, (list, dict)) and len(json.dumps(value)) > limit
    ]
    if not large:
        return dict(result)
    kept = {key: value for key, value in figures.items() if key not in large}
    return {**result, "figures": kept, "left_out": [*result.get("left_out", ()), *large]}


def _brief(value: Any) -> Any:
    """Five digits of what is no whole number; {"value": x} is x; of METRIC and METRIC:OPCODE the first."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.5g}")
    if isinstance(value, list):
        return [_brief(one) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"value"}:
        return _brief(value["value"])
    opcodes = {key for key in value if ":" in key and key.partition(":")[0] in value}
    return {key: _brief(one) for key, one in value.items() if key not in opcodes and key not in _BULK}


def said(run: Mapping[str, Any], most: int = 3) -> str:
    """What the gates said, in a line: of what is no PASS, the first few."""
    results = [result for gate in registry.NAMES for result in run.get(gate, ())]
    others = [result for result in results if result["verdict"] != PASS]
    if not others:
        return PASS
    lines = [": ".join(str(part) for part in _of_result(result)) for result in others[:most]]
    more = [f"and {len(others) - most} more"] if len(others) > most else []
    return "; ".join([*lines, *more])


def _of_result(result: Mapping[str, Any]) -> list[str]:
    """Subject, verdict, and the first thing that speaks against it; the gate sass has findings of its own form."""
    problems = result.get("problems") or [finding["kind"] for finding in result.get("secret_findings", ())]
    return [result.get("subject") or result["kernel"], result["verdict"], *problems[:1]]


def verdict(runs: Sequence[Mapping[str, Any]]) -> str:
    """The worst that the gates said in these runs."""
    return worst(result["verdict"] for run in runs for gate in registry.NAMES for result in run.get(gate, ()))


def as_text(content: dict[str, Any]) -> str:
    """The file's text, which any JSON reader takes."""
    portable = json.loads(json.dumps(content), parse_constant=str)  # JSON has no NaN: the word instead
    return json.dumps(portable, indent=1, allow_nan=False) + "\n"


def write(content: dict[str, Any], path: Path) -> None:
    """Store evidence. Refused, and nothing written, if it is larger than a file that people review should be."""
    text = as_text(content)
    if len(text) > MAX_BYTES:
        raise Refused(f"the evidence has {len(text)} bytes; at most {MAX_BYTES} are stored")
    write_whole(text, path)
