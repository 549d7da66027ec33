"""Makes audits/evidence.json of what the gates said: by kernel, with its hashes, so that each claim names its binary.

A run is what ``gates all --json`` writes. One run over all kernels, or several that share the machine, the build and
the versions (say one for each kernel), make one evidence file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dhp_safe_fa import evidence
from dhp_safe_fa._files import write_whole

from .. import provenance, registry, tools
from ..verdict import NOT_RUN, worst

ROOT = evidence.CHECKOUT.parents[1]
# What the kernels, their build and the gates are made of; documents and stored results may differ from the commit.
SOURCES = ("csrc", "setup.py", "dhp_safe_fa", "tests/controls", "audits/sass_policy.json")
QUICK_IS_EVIDENCE = tuple(gate.name for gate in registry.GATES if gate.quick_is_evidence)
# Runs with other values of these are of another machine or another build.
SAME = ("commit", "gpu", "driver", "cuda", "torch", "nvcc", "kernels")
MAX_BYTES = 100_000
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
    if dirty:
        raise Refused(f"sources differ from the commit ({', '.join(SOURCES)}): commit them first, then build")
    if not (ROOT / "setup.py").exists():
        raise Refused("an installed package has no sources for evidence to be bound to: use a checkout")
    if provenance.of_sources(ROOT)["all"] != built:
        raise Refused("csrc/ or setup.py have changed since the library was built from them: run `make build`")
    for name, sha256 in kernels.items():
        cubin = ROOT / "build" / "cubins" / f"{name}.cubin"
        if not cubin.is_file() or hashlib.sha256(cubin.read_bytes()).hexdigest() != sha256:
            raise Refused(f"{name}: the library holds another cubin than build/cubins/: run `make build`")


def assemble(
    runs: Sequence[dict[str, Any]],
    kernels: Sequence[dict[str, Any]],
    listings: dict[str, str],
    now: dict[str, str | None],
) -> dict[str, Any]:
    """The evidence file's content.

    Args:
        runs: what ``gates all --json`` wrote.
        kernels: what this build holds (``_inspect.kernels()``). Every run must be of exactly these.
        listings: by kernel, the SHA-256 of its disassembly.
        now: digests of what takes part in verdicts (``provenance.here()``).

    Raises:
        Refused: a run is of another machine or build than the first, or of a machine without a Hopper GPU, or was made
            in another way than `make evidence` would, or a kernel has no result of some gate.
    """
    environment = runs[0]["environment"]
    if not environment.get("gpu"):
        raise Refused("this was run without a GPU: the gates need a Hopper GPU")
    require_same_machine(runs)
    if environment.get("kernels") != {kernel["name"]: kernel["cubin_sha256"] for kernel in kernels}:
        raise Refused("the run was made with other kernels than this build holds")
    for run in runs:
        require_made_as_evidence(run, now)
    renewed = [(gate, name) for run in runs for gate, names in run.get("again", {}).items() for name in names]
    head = {
        "schema": evidence.SCHEMA,
        "environment": environment,
        "quick": sorted({gate for run in runs for gate in run["how"]["quick"]}),
        "digests": now,
        "again": sorted({f"{gate} {name}" for gate, name in renewed}),
        "runs_sha256": [digest(run) for run in runs],
    }
    for limit in _NESTED_LIMITS:
        entries = {kernel["name"]: _entry(kernel, listings[kernel["name"]], runs, limit) for kernel in kernels}
        content = {**head, "kernels": entries}
        if len(as_text(content)) <= MAX_BYTES:
            break
    return content


def require_made_as_evidence(run: dict[str, Any], now: dict[str, str | None]) -> None:
    """Refused if a run was made in a way in which `make evidence` makes none, or with other parts than those of now."""
    how = run.get("how")
    said = {"quick": list, "sources": dict, "digests": dict}
    if not isinstance(how, dict) or not all(isinstance(how.get(key), kind) for key, kind in said.items()):
        raise Refused("a run does not say how it was made, as those of this version do: run the gates again")
    if run["environment"].get("dirty"):
        raise Refused("a run was made with sources that differ from the commit that it names")
    if how["sources"].get("built") is None or how["sources"].get("built") != how["sources"].get("here"):
        raise Refused("a run was made with a library that was not built from the sources of the commit that it names")
    hasty = [gate for gate in how["quick"] if gate not in QUICK_IS_EVIDENCE]
    if hasty:
        raise Refused(f"{', '.join(hasty)}: run with --quick, and evidence needs all of its repeats")
    if how["digests"].get("policy") != now["policy"]:
        raise Refused("a run was made with another policy than audits/sass_policy.json")
    changed = [part for part, digest in now.items() if how["digests"].get(part) != digest]
    if changed:
        raise Refused(f"a run was made with another {', another '.join(changed)} than this checkout has: run it again")


def digest(content: Any) -> str:
    """SHA-256 of a JSON value, whatever its spacing and order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def listing_digest(cubin: bytes) -> str:
    """SHA-256 of the disassembly that the gate sass reads, by CUDA 13's nvdisasm: another may print it otherwise."""
    return hashlib.sha256(tools.disassemble(cubin).encode()).hexdigest()


def _entry(kernel: dict[str, Any], listing: str, runs: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    name, sha256 = kernel["name"], kernel["cubin_sha256"]
    gates = {"sass": _sass(name, sha256, runs)}
    for gate in registry.EXECUTING:
        results = [result for run in runs for result in run[gate] if result["subject"] == name]
        if not results:  # one that could not run at all speaks of all kernels at once
            results = [result for run in runs for result in run[gate] if result["verdict"] == NOT_RUN]
        if len(results) != 1:
            raise Refused(f"{name}: {len(results)} results of the gate {gate}; one is needed")
        gates[gate] = compact(results[0], limit)
    return {
        "cubin_sha256": sha256,
        "listing_sha256": listing,
        "registers": kernel["registers"],
        "spill_bytes": kernel["spill_bytes"],
        "gates": gates,
    }


def _sass(name: str, sha256: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reports = [report for run in runs for report in run["sass"] if report.get("kernel") == name]
    if len(reports) != 1 or reports[0]["cubin_sha256"] != sha256:
        raise Refused(f"{name}: {len(reports)} results of the gate sass about this cubin; one is needed")
    (report,) = reports
    figures = {key: report[key] for key in ("instructions", "predicated_branches", "indirect_branches")}
    figures["secret_findings"] = len(report["secret_findings"])
    return {"verdict": report["verdict"], "figures": figures, "problems": report["unknown_opcodes"]}


def compact(result: dict[str, Any], limit: int = _NESTED_LIMITS[0]) -> dict[str, Any]:
    """A gate's result (GateResult as JSON) without bulk.

    Controls are counted. Opcodes, which have a counter each, are left to their total. A nested figure of more than
    ``limit`` bytes is left out, and named.
    """
    figures, left_out = {}, []
    for key, value in result["figures"].items():
        short = _brief(value)
        if isinstance(value, (list, dict)) and len(json.dumps(short)) > limit:
            left_out.append(key)
        else:
            figures[key] = short
    problems = result["problems"]
    kept: dict[str, Any] = {"verdict": result["verdict"], "figures": figures, "problems": problems[:_MAX_PROBLEMS]}
    if left_out:
        kept["left_out"] = left_out
    if len(problems) > _MAX_PROBLEMS:
        kept["more_problems"] = len(problems) - _MAX_PROBLEMS
    controls = result["controls"]
    kept["controls"] = {"right": sum(not control["problem"] for control in controls), "of": len(controls)}
    return kept


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


def verdict(content: dict[str, Any]) -> str:
    """The worst verdict in an evidence file."""
    return worst(gate["verdict"] for kernel in content["kernels"].values() for gate in kernel["gates"].values())


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


def require_same_machine(runs: Sequence[dict[str, Any]]) -> None:
    """Refused if the runs' environments differ in what matters."""
    for run in runs:
        differing = [key for key in SAME if run["environment"].get(key) != runs[0]["environment"].get(key)]
        if differing:
            raise Refused(f"the runs differ in {', '.join(differing)}: they must be of one machine and one build")
