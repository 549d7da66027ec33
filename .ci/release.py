"""The release checklist: looks at everything that has to be true of a release, in order, and stops at the first that is
not. It publishes nothing.

    python .ci/release.py [--list]        (make release; on a Hopper GPU, or with the evidence of one committed)
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What every wheel is tried beside: the oldest torch that is supported, and the newest.
TORCHES = "torch==2.10.* torch"


class Refused(Exception):
    """One sentence: what is not true, and what makes it true."""


def output(root: Path, *command: str) -> str:
    """What a command prints. Refused if it fails."""
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stdout + result.stderr).strip()
        raise Refused(f"`{' '.join(command)}` ended with {result.returncode}:\n{said}")
    return result.stdout


def passes(root: Path, *command: str, **environment: str) -> None:
    """Runs a command that takes long, in sight. Refused if it fails."""
    code = subprocess.run(command, cwd=root, env={**os.environ, **environment}).returncode
    if code != 0:
        raise Refused(f"`{' '.join(command)}` ended with {code}")


def version_of(root: Path) -> str:
    return re.findall(r'"(.+)"', (root / "dhp_safe_fa" / "_version.py").read_text())[-1]


def pythons_of(root: Path) -> list[str]:
    """The versions that pyproject.toml promises."""
    return re.findall(r'"Programming Language :: Python :: (\d+\.\d+)"', (root / "pyproject.toml").read_text())


# ---- the list, in order ----------------------------------------------------------------------------------------------


def clean(root: Path) -> None:
    """everything is committed"""
    changed = output(root, "git", "status", "--porcelain")
    if changed:
        raise Refused(f"commit or remove what git does not have:\n{changed.rstrip()}")


def version(root: Path) -> None:
    """version and day stand in CHANGELOG.md, and no tag has the version yet"""
    wanted = version_of(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+", wanted):
        raise Refused(f"_version.py says {wanted}; a release is MAJOR.MINOR.PATCH")
    top = re.search(r"^## \[(.+?)\] - (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not top or top[1] != wanted:
        raise Refused(f"CHANGELOG.md begins with {top[1] if top else 'no version'}, _version.py says {wanted}")
    try:
        day = datetime.date.fromisoformat(top[2])
    except ValueError:
        raise Refused(f"CHANGELOG.md gives {wanted} no day (YYYY-MM-DD) but {top[2]!r}") from None
    if day > datetime.date.today():
        raise Refused(f"CHANGELOG.md dates {wanted} {day}, which is to come")
    if output(root, "git", "tag", "--list", f"v{wanted}"):
        raise Refused(f"the tag v{wanted} is there already: a version is released once")


def built(root: Path) -> None:
    """the build is of these sources, with its GPU kernels"""
    passes(root, sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    output(root, sys.executable, "-m", "dhp_safe_fa", "--verify")
    if not list((root / "build" / "cubins").glob("*.cubin")):
        raise Refused("no GPU kernel was built: nvcc is needed (in CUDA_HOME if set, else PATH, /usr/local/cuda)")


def evidence(root: Path) -> None:
    """every kernel has evidence of today's gates: `make evidence` on a Hopper GPU"""
    output(root, sys.executable, "-m", "dhp_safe_fa.gates", "status")


def readme(root: Path) -> None:
    """README.md says of the evidence what is true"""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "README.md"
        written.write_text((root / "README.md").read_text())
        output(root, sys.executable, "-m", "dhp_safe_fa.gates", "status", "--write", str(written))
        if written.read_text() != (root / "README.md").read_text():
            raise Refused("README.md is out of date: `python -m dhp_safe_fa.gates status --write README.md`")


def lint(root: Path) -> None:
    """format, style and types: make lint"""
    passes(root, "make", "lint")


def tests(root: Path) -> None:
    """all tests: make test-long, make test"""
    passes(root, "make", "test-long")
    passes(root, "make", "test")


def wheels(root: Path) -> None:
    """a wheel for every Python, kernels compiled anew, past auditwheel, tried beside the oldest and newest torch"""
    passes(root, "make", "package", PYTHONS="all", TORCHES=TORCHES, FROM_NOTHING="1")


def complete(root: Path) -> None:
    """dist/ holds the source archive and these wheels, and the tree is still clean"""
    wanted, names = version_of(root), sorted(path.name for path in (root / "dist").glob("*"))
    expected = {f"source archive: dhp_safe_fa-{wanted}.tar.gz": re.escape(f"dhp_safe_fa-{wanted}.tar.gz")}
    for python in pythons_of(root):
        tag = "cp" + python.replace(".", "")
        name = f"dhp_safe_fa-{re.escape(wanted)}-{tag}-{tag}"
        expected[f"manylinux wheel of Python {python}"] = rf"{name}-manylinux.*\.whl"
    missing = [what for what, pattern in expected.items() if not any(re.fullmatch(pattern, name) for name in names)]
    others = [name for name in names if not any(re.fullmatch(pattern, name) for pattern in expected.values())]
    if missing or others:
        raise Refused("dist/: " + "; ".join([*(f"no {what}" for what in missing), *(f"also {n}" for n in others)]))
    clean(root)


CHECKLIST: tuple[Callable[[Path], None], ...] = (
    clean, version, built, evidence, readme, lint, tests, wheels, complete,
)  # fmt: skip


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="The release checklist. 0 if everything on it is true.")
    parser.add_argument("--list", action="store_true", help="print the list, look at nothing")
    only_list = parser.parse_args(arguments).list
    refused: str | None = None
    lines = []
    for step in CHECKLIST:
        what = f"{step.__name__}: {step.__doc__}"
        if only_list or refused:
            lines.append(f"[ ] {what}")
            continue
        print(f"-- {what}", flush=True)
        try:
            step(root)
            lines.append(f"[x] {what}")
        except Refused as error:
            refused = f"refused at {step.__name__}: {error}"
            lines.append(f"[!] {what}")
    print("\n".join(lines))
    if refused:
        print(refused, file=sys.stderr)
        return 1
    if not only_list:
        print(f"ready: git tag v{version_of(root)}, and what lies in dist/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
