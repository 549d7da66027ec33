"""What a wheel must hold, and must not. Called by .ci/package and by tests/project/test_packaging.py.

python .ci/check_wheel.py WHEEL
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

LIBRARIES = {"dhp_safe_fa/libdhp_fa.so", "dhp_safe_fa/libdhp_torch.so"}
CONTROLS = {"dhp_safe_fa/gates/planted/manifest.json", "dhp_safe_fa/gates/planted/plain.cubin"}
POLICY = {"dhp_safe_fa/gates/sass_policy.json"}
PROVENANCE = "dhp_safe_fa/provenance.json"
SBOM = ".dist-info/sboms/dhp_safe_fa.cdx.json"
# A folder of somebody's machine: in a home, in a temporary or a working folder.
PRIVATE_PATH = re.compile(rb"/(?:home|root|tmp|work|build|src)/[\w./-]+")


def check_record(wheel: zipfile.ZipFile) -> list[str]:
    """What the build says of itself, against what the wheel holds after all that was done to it."""
    wrong = []
    built = json.loads(wheel.read(PROVENANCE))
    wanted = {f"dhp_safe_fa/{name}": sha256 for name, sha256 in built["libraries"].items()}
    if built["evidence"]:
        wanted["dhp_safe_fa/audits/evidence.json"] = built["evidence"]
    found = {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in wheel.namelist()}
    wrong += [f"{name}: not as {PROVENANCE} says" for name in sorted(wanted) if found.get(name) != wanted[name]]
    unnamed = {name for name in found if name.endswith(".so")} - wanted.keys()
    wrong += [f"{name}: {PROVENANCE} does not name it" for name in sorted(unnamed)]
    library = wheel.read("dhp_safe_fa/libdhp_fa.so")
    for name, kernel in built["kernels"].items():
        cubin = library[kernel["offset"] : kernel["offset"] + kernel["size"]]
        if hashlib.sha256(cubin).hexdigest() != kernel["sha256"]:
            wrong.append(f"{name}: the library does not hold this cubin where {PROVENANCE} says")
    listed = "".join(wheel.read(name).decode() for name in found if name.endswith(SBOM))
    hashes = [*built["libraries"].values(), *(kernel["sha256"] for kernel in built["kernels"].values())]
    if not listed or not all(sha256 in listed for sha256 in hashes):
        wrong.append(f"{SBOM}: does not list every library and cubin")
    return wrong


def check(path: Path, has_kernels: bool | None = None) -> list[str]:
    """Sentences that say what is wrong with a wheel; none if nothing is. has_kernels: None if either will do."""
    wrong = []
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        recorded = [line.split(",")[0] for line in wheel.read(record).decode().splitlines()]
        for name in sorted(set(recorded) ^ names):
            wrong.append(f"{name}: in only one of archive and RECORD")
        for name in recorded:
            if name.startswith("/") or ".." in name.split("/"):
                wrong.append(f"{name}: not a path below site-packages")
            if not name.startswith(("dhp_safe_fa/", "dhp_safe_fa-")):
                wrong.append(f"{name}: outside the package")
        holds_kernels = b".nv.info" in wheel.read("dhp_safe_fa/libdhp_fa.so")  # a section of every cubin
        if has_kernels is not None and holds_kernels != has_kernels:
            wrong.append(f"libdhp_fa.so: {'holds' if holds_kernels else 'lacks'} GPU kernels")
        for name in sorted((LIBRARIES | POLICY | {PROVENANCE} | (CONTROLS if holds_kernels else set())) - names):
            wrong.append(f"{name}: missing")
        for name in sorted(name for name in names if name.endswith(".so")):
            for found in sorted(set(PRIVATE_PATH.findall(wheel.read(name)))):
                wrong.append(f"{name}: names a folder of the machine that built it: {found.decode()}")
        if PROVENANCE in names:
            wrong += check_record(wheel)
    return wrong


if __name__ == "__main__":
    problems = [problem for argument in sys.argv[1:] for problem in check(Path(argument))]
    sys.exit("\n".join(problems) or None)
