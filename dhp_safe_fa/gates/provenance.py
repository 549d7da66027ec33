"""What takes part in a verdict, as SHA-256 digests: stored with the evidence, and compared with what is here now.

    launch      what plans, schedules and launches: the host core, the shim and the table of kernels as they were built
                (``_inspect.build_info()["sources"]["launch"]``), and the Python between a caller and the operator. The
                inspection module is among them: by its plan a gate chooses shapes that launch the kernel it means
    controls    the planted leaks, and the step of the build that some go through
    policy      the reviewed exceptions of the gate sass
    shared      the sources that all gates share
    gate NAME   the sources of one gate

The kernels' machine code is bound by its own hash, not by its sources. A digest is over names and bytes, so a comment
counts. A checkout and a wheel give the same digests: what a wheel has no sources of (csrc, tests/controls), the build
has left in it. A part that cannot be had is None, and is not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from .registry import GATES

_GATES = Path(__file__).resolve().parent
_PACKAGE = _GATES.parent
ROOT = _PACKAGE.parent
CONTROLS = ROOT / "tests" / "controls"
UNBRANCH = ROOT / "csrc" / "kernels" / "unbranch.py"
# What `controls.build_controls` leaves beside compiled controls, and where a wheel has it.
MANIFEST = "manifest.json"
PACKAGED = _GATES / "planted"
# The checkout's, and the copy that a wheel has of it.
_POLICIES = (ROOT / "audits" / "sass_policy.json", _GATES / "sass_policy.json")
POLICY = next(filter(Path.exists, _POLICIES), _POLICIES[0])
# Of the top of gates/ everything is shared, but for the list of gates and this file, which judge nothing: a new gate
# does not make the verdicts of the others old.
_JUDGE_NOTHING = ("registry.py", "provenance.py")
# Between a caller and the operator.
_FRONT = ("__init__.py", "_ops.py", "_operator/*.py")
# The folder of csrc without a say in what a GPU is given.
_CPU = ("csrc", "cpu")
_LAUNCH_ENDINGS = (".c", ".h", ".cpp", ".py")


def digest(files: Iterable[Path], root: Path) -> str:
    """SHA-256 over the files' names below root and their bytes, in the order of the names."""
    whole = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = path.read_bytes()
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def _below(folder: Path) -> list[Path]:
    """Every file below a folder that is no product of running it."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


# ---- what a build is made of -----------------------------------------------------------------------------------------


def source_files(root: Path) -> list[Path]:
    """What a build is made of: all of csrc, and setup.py with its flags."""
    return [*_below(root / "csrc"), root / "setup.py"]


def of_sources(root: Path) -> dict[str, str]:
    """What setup.py puts into a build: `all` of its sources, and of these what takes part in a `launch`."""
    files = source_files(root)
    launch = [f for f in files if f.suffix in _LAUNCH_ENDINGS and f.relative_to(root).parts[:2] != _CPU]
    return {"all": digest(files, root), "launch": digest(launch, root)}


def built_and_here() -> dict[str, str | None]:
    """The digest of all sources that the build was `built` from, and of those that lie `here` (None in a wheel)."""
    from dhp_safe_fa import _inspect

    here = of_sources(ROOT)["all"] if (ROOT / "setup.py").exists() else None
    return {"built": _inspect.build_info()["sources"]["all"], "here": here}


# ---- what takes part in a verdict ------------------------------------------------------------------------------------


def of_launch(built: str) -> str:
    """built: the digest that the build carries of its launch sources."""
    front = digest((path for pattern in _FRONT for path in _PACKAGE.glob(pattern)), _PACKAGE)
    return hashlib.sha256(f"{built} {front}".encode()).hexdigest()


def of_controls(sources: Path = CONTROLS, unbranch: Path = UNBRANCH) -> str | None:
    """Of the checkout's sources, else as a wheel's build has written it down; None if there are no controls."""
    if sources.is_dir():
        step = unbranch.read_bytes() if unbranch.exists() else b""
        return hashlib.sha256(digest(_below(sources), sources).encode() + step).hexdigest()
    manifest = PACKAGED / MANIFEST
    return str(json.loads(manifest.read_text())["sources"]) if manifest.exists() else None


def of_policy(path: Path = POLICY) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def of_gates(folder: Path = _GATES) -> dict[str, str]:
    """shared, and "gate NAME" for every gate; folder: dhp_safe_fa/gates."""
    shared = [path for path in folder.glob("*.py") if path.name not in _JUDGE_NOTHING]
    shared += _below(folder / "families")
    own = {f"gate {gate.name}": digest(_below(folder / gate.name), folder) for gate in GATES}
    return {"shared": digest(shared, folder), **own}


def here() -> dict[str, str | None]:
    """All parts as they are now in this build and on this disk."""
    from dhp_safe_fa import _inspect

    built = _inspect.build_info()["sources"]["launch"]
    return {"launch": of_launch(built), "controls": of_controls(), "policy": of_policy(), **of_gates()}
