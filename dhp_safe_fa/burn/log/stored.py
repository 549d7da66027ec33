"""What was measured before there was a loop: stored benchmark results of git history, as records without a verdict."""

from __future__ import annotations

import json

from dhp_safe_fa.bench import anchors, results
from dhp_safe_fa.burn.builds.keeping import git
from dhp_safe_fa.burn.families import FAMILIES
from dhp_safe_fa.burn.log.records import FORWARD, Kernel, Record, Shape
from dhp_safe_fa.burn.measuring import chip

RESULT = "benchmarks/results/{gpu}_{family}.json"


def imported(name: str, revision: str, family: str = FORWARD, gpu: str = "h100") -> Record:
    """The stored GPU result of a commit, with FlashAttention-3, if it was not measured, as that commit's anchors
    estimate it. What it does not say is None.

    Raises:
        BuildFailed: there is no such commit, or it lacks one of the files.
        ValueError: the file is no benchmark result of a CUDA run.
    """
    source = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    report = results.from_json(json.loads(git("show", f"{source}:{RESULT.format(gpu=gpu, family=family)}")))
    environment = report.environment
    shapes = []
    table, direction = f"{source}:{anchors.FILE.format(direction=family)}", FAMILIES[family].direction
    text = git("show", table)
    for peer, column in direction.estimates.items():
        factors = anchors.parse(text, table, direction.case, column)
        report.results = [anchors.with_estimate(result, factors, peer) for result in report.results]
    for result in report.results:
        us: dict[str, list[float | None]] = {o.name: [o.graph_us.median] for o in result.outcomes if o.graph_us}
        absent = {o.name: o.reason for o in result.outcomes if o.reason}
        shapes.append(Shape(result.case.label, us, absent=absent))
    return Record(
        name=name,
        kind="imported",
        date=environment["date"],
        commit=None if environment["dirty"] else environment["commit"],  # other sources than the commit's: unknown
        chip=chip.of_environment(environment, None),
        settings=report.settings,
        source=source,
        nvcc=environment["nvcc"],
        kernels=[Kernel(n, sha, None, None, None, None, None) for n, sha in environment["kernels"].items()],
        shapes=shapes,
        family=family,
    )
