"""What a wheel must hold, and must not. Called by .ci/package and by tests/project/test_packaging.py.

python .ci/check_wheel.py WHEEL
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LIBRARIES = {"dhp_safe_fa/libdhp_fa.so", "dhp_safe_fa/libdhp_torch.so"}
CONTROLS = {"dhp_safe_fa/gates/planted/manifest.json", "dhp_safe_fa/gates/planted/plain.cubin"}
POLICY = {"dhp_safe_fa/gates/sass_policy.json"}
# A folder of somebody's machine: in a home, in a temporary or a working folder.
PRIVATE_PATH = re.compile(rb"/(?:home|root|tmp|work|build|src)/[\w./-]+")


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
        for name in sorted((LIBRARIES | POLICY | (CONTROLS if holds_kernels else set())) - names):
            wrong.append(f"{name}: missing")
        for name in sorted(name for name in names if name.endswith(".so")):
            for found in sorted(set(PRIVATE_PATH.findall(wheel.read(name)))):
                wrong.append(f"{name}: names a folder of the machine that built it: {found.decode()}")
    return wrong


if __name__ == "__main__":
    problems = [problem for argument in sys.argv[1:] for problem in check(Path(argument))]
    sys.exit("\n".join(problems) or None)
