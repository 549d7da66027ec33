"""``python -m dhp_safe_fa.bench.stored``: the stored runs of a checkout, and whether their kernels are those of today.

With ``--write README.md`` the table goes between that file's two markers; a test holds it to what is true. A run is
stale if a kernel that today serves such calls is not, by its SHA-256, the one that the run had. Runs on a CPU have no
such mark: their code is bound to the commit alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dhp_safe_fa import _inspect
from dhp_safe_fa._files import write_whole

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BEGIN, END = "<!-- stored runs -->", "<!-- /stored runs -->"
_BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)

# Direction of a case: which kernels may serve it, by their family, or by family and part.
_PACKED = ("forward packed out", "tiles")
_GRADIENTS = ("backward", "bounds", "delta", "dq_out")
SERVED_BY = {
    "forward": ("forward out",),
    "backward": _GRADIENTS,
    "training": ("forward out", *_GRADIENTS),
    "decode": ("forward out", "decode", "fold"),
    "varlen": _PACKED,
    "paged": _PACKED,
    "forms": (*_PACKED, "forward packed out sinks", "forward packed out softcap", "forward out", "forward window out"),
}
# What benchmarks/context_parallel.py times, and in which dtype.
_OVER_RANKS = {("forward", "bfloat16"), ("backward", "bfloat16")}


class StoredRun(NamedTuple):
    """
    Attributes:
        path: below the folder of stored runs.
        commit: None if the run was not of a checkout.
        same, of: how many of the kernels that today serve such calls the run had; of is 0 on a CPU.
    """

    path: str
    machine: str
    commit: str | None
    same: int
    of: int

    @property
    def is_stale(self) -> bool:
        return self.same < self.of

    def row(self) -> str:
        kernels = "–" if self.of == 0 else f"{self.same} of {self.of}" + (": **stale**" if self.is_stale else "")
        commit = f"`{self.commit[:7]}`" if self.commit else "not known"
        return f"| `{self.path}` | {self.machine} | {commit} | {kernels} |"


def _kinds(run: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(direction, dtype) of what was timed."""
    if "results" not in run:
        return _OVER_RANKS
    cases = [result["case"] for result in run["results"]]
    return {(case.get("direction", "forward"), case["dtype"]) for case in cases}


def stored_run(path: Path, folder: Path, kernels: Iterable[Mapping[str, Any]]) -> StoredRun:
    """kernels: of today, as of ``_inspect.kernels()``. ValueError for a file that is no stored run."""
    run = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(run, dict) or "environment" not in run:
        raise ValueError(f"{path} is no stored run: it does not say on which machine it was made")
    environment = run["environment"]
    had = environment.get("kernels") or {}
    of = [
        kernel
        for kernel in kernels
        if "cuda" in environment
        and any(
            kernel["dtype"] == dtype
            and {kernel["family"], f"{kernel['family']} {kernel['part']}"} & {*SERVED_BY[direction]}
            for direction, dtype in _kinds(run)
        )
    ]
    same = sum(had.get(kernel["name"]) == kernel["cubin_sha256"] for kernel in of)
    return StoredRun(path.relative_to(folder).as_posix(), environment["device"], environment["commit"], same, len(of))


def stored_runs(folder: Path, kernels: Sequence[Mapping[str, Any]]) -> list[StoredRun]:
    """Those of one GPU or CPU, then those of several GPUs. What is measured to choose a kernel is no claim."""
    paths = [*sorted(folder.glob("*.json")), *sorted(folder.glob("context_parallel/*.json"))]
    return [stored_run(path, folder, kernels) for path in paths]


def table(runs: Iterable[StoredRun]) -> str:
    head = "| stored run | machine | commit | kernels for such calls that are still the same |\n|---|---|---|---|\n"
    return head + "".join(f"{run.row()}\n" for run in runs)


def rewrite(readme: str, runs: Iterable[StoredRun]) -> str:
    """ValueError if it lacks the markers."""
    if not _BETWEEN.search(readme):
        raise ValueError(f"there are no lines {BEGIN} and {END}")
    return _BETWEEN.sub(lambda _: table(runs), readme)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dhp_safe_fa.bench.stored", description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", metavar="README.md", type=Path, help="bring the table in that file up to date")
    arguments = parser.parse_args(argv)
    try:
        kernels = _inspect.kernels()
        if not kernels:
            raise ValueError("this build has no GPU kernels to compare with: nvcc was not found when it was built")
        if not RESULTS.is_dir():
            raise ValueError("there are no stored runs: they are in a checkout's benchmarks/results")
        runs = stored_runs(RESULTS, kernels)
        if arguments.write:
            write_whole(rewrite(arguments.write.read_text(encoding="utf-8"), runs), arguments.write)
    except (ValueError, OSError) as error:
        print(f"dhp_safe_fa.bench.stored: {error}", file=sys.stderr)
        return 2
    print(table(runs), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
