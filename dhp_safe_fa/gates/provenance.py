"""What takes part in a verdict, as SHA-256 digests: stored with the evidence, and compared with what is here now.

    launch FAMILY   what plans, schedules and launches a family's kernels: the host core and the shim as they were
                    built (``_inspect.build_info()["sources"]["launch"]``), what the table of kernels says of it, and
                    the Python between a caller and the operator. The inspection module is among them: by its plan a
                    gate chooses shapes that launch the kernel it means
    family FAMILY   how a family's kernels are put under test
    kernels KERNEL  the machine code of that kernel and of all with whose bits its own are compared
    controls        the planted leaks, and the step of the build that some go through
    policy          the reviewed exceptions of the gate sass
    shared          the sources that all gates share
    gate NAME       the sources of one gate

The kernels' machine code is bound by its own hash, not by its sources. A host source takes part in the launch of a
family unless all that it includes of csrc/families are families of other calls: what leads to the backward alone says
nothing of the forward. Families are of one call if one includes headers of the other, or both those of a third;
that none uses another's by the C ABI alone, a test finds in what is linked. A digest is over the files' names and bytes
without comments (without_comments.py), but of controls over all bytes: their headers say what is expected of them. A
checkout and a wheel give the same digests: what a wheel has no sources of (csrc, tests/controls), the build has left in
it. A part that cannot be had is None, and is not compared.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .registry import GATES
from .without_comments import without_comments

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
# Of the top of gates/ everything is shared, but for the list of gates, this file and what it reads with, which judge
# nothing: a new gate does not make the verdicts of the others old.
_JUDGE_NOTHING = ("registry.py", "provenance.py", "without_comments.py")
# Between a caller and the operator; but for what runs under a transform, autocast or a compiler, or once a call is
# refused, and then gives the operator other tensors, or no call: no gate's launch comes from there.
_FRONT = ("__init__.py", "_ops.py", "_segments.py", "_widths.py", "_windows.py", "_operator/*.py")
_NOT_IN_FRONT = tuple(f"_operator/{name}.py" for name in ("autocast", "fake", "transforms", "wrong_types"))
# The folder of csrc without a say in what a GPU is given.
_CPU = ("csrc", "cpu")
_LAUNCH_ENDINGS = (".c", ".h", ".cpp")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# The family whose kernel has to do with all others of its calls: it lists the tiles that they compute.
_WITH_ALL = "tiles"
# Of a kernel's row in the table: what its machine code is, which has a hash of its own, and no launch asks for.
_NOT_LAUNCHED_BY = ("cubin_sha256", "registers", "spill_bytes")


def digest(files: Iterable[Path], root: Path, read: Callable[[Path], bytes] = without_comments) -> str:
    """SHA-256 over the files' names below root and what is read of each, in the order of the names."""
    whole = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = read(path)
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def _below(folder: Path) -> list[Path]:
    """Every file below a folder that is no product of running it."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


# ---- what a build is made of -----------------------------------------------------------------------------------------


def source_files(root: Path) -> list[Path]:
    """What a build is made of: all of csrc, and setup.py with its flags."""
    return [*_below(root / "csrc"), root / "setup.py"]


def _families_of(source: Path, csrc: Path) -> frozenset[str]:
    """The families whose headers a source includes, by way of others, too; and the one in whose folder it lies."""
    seen: set[Path] = set()
    ahead = [source.resolve()]
    while ahead:
        here = ahead.pop()
        if here not in seen:
            seen.add(here)
            for name in _INCLUDE.findall(here.read_text(encoding="utf-8")):
                ahead += [path.resolve() for path in (here.parent / name, csrc / name) if path.is_file()][:1]
    places = (path.relative_to(csrc.resolve()).parts for path in seen if path.is_relative_to(csrc.resolve()))
    return frozenset(place[1] for place in places if place[0] == "families")


def _calls(families_of: Mapping[Path, frozenset[str]], csrc: Path) -> dict[str, frozenset[str]]:
    """Family to the families of the same calls. families_of: of each host source."""
    found = {path.parent.name: frozenset({path.parent.name}) for path in (csrc / "families").glob("*/family.py")}
    for path, families in families_of.items():
        if path.relative_to(csrc).parts[0] == "families":
            joined = frozenset().union(*(found.get(family, {family}) for family in families))
            found |= dict.fromkeys(joined, joined)
    return found


def of_all_sources(root: Path) -> str:
    """Of all that a build is made of, by its bytes."""
    return digest(source_files(root), root, Path.read_bytes)


def of_sources(root: Path) -> dict[str, Any]:
    """What setup.py puts into a build: `all` of its sources, and of these what takes part in a `launch`, by family."""
    csrc, read = root / "csrc", cache(without_comments)  # most sources take part in all launches
    host = [f for f in source_files(root) if f.suffix in _LAUNCH_ENDINGS and f.relative_to(root).parts[:2] != _CPU]
    launch = {
        family: digest([root / "setup.py", *sources], root, read)
        for family, sources in launch_sources(host, csrc).items()
    }
    return {"all": of_all_sources(root), "launch": launch}


def launch_sources(host: Iterable[Path], csrc: Path) -> dict[str, list[Path]]:
    """Family to the host sources that take part in its launches, of these."""
    families_of = {path: _families_of(path, csrc) for path in host}
    return {
        family: [path for path, families in families_of.items() if not families or families & call]
        for family, call in sorted(_calls(families_of, csrc).items())
    }


def built_and_here() -> dict[str, str | None]:
    """The digest of all sources that the build was `built` from, and of those that lie `here` (None in a wheel)."""
    from dhp_safe_fa import _inspect

    here = of_all_sources(ROOT) if (ROOT / "setup.py").exists() else None
    return {"built": _inspect.build_info()["sources"]["all"], "here": here}


# ---- what takes part in a verdict ------------------------------------------------------------------------------------


def front_files(package: Path) -> list[Path]:
    """Its Python that takes part in every launch."""
    found = (path for pattern in _FRONT for path in package.glob(pattern))
    return [path for path in found if path.relative_to(package).as_posix() not in _NOT_IN_FRONT]


def of_launch(built: Mapping[str, str], kernels: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """"launch FAMILY" for every family. built: the digests that the build carries of its launch sources; kernels: what
    its table says of them (``_inspect.kernels()``)."""
    front = digest(front_files(_PACKAGE), _PACKAGE)
    rows: dict[str, list[Any]] = {sources: [] for sources in built.values()}  # families of one call have the same
    for kernel in kernels:
        row = [(key, kernel[key]) for key in sorted(kernel) if key not in _NOT_LAUNCHED_BY]
        rows[built[kernel["family"]]].append(row)
    return {
        f"launch {family}": hashlib.sha256(f"{sources} {front} {json.dumps(rows[sources])}".encode()).hexdigest()
        for family, sources in built.items()
    }


def of_kernels(built: Mapping[str, str], kernels: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """"kernels KERNEL" for every kernel; arguments as of_launch's. Compared are kernels of the same calls, dtype and
    head_dim: a call has one of each, and so have the forms in which its rows are computed again."""
    kernels = list(kernels)

    def is_met(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        alike = all(one[key] == other[key] for key in ("dtype", "head_dim"))
        of_one_call = built[one["family"]] == built[other["family"]]
        return of_one_call and (alike or _WITH_ALL in (one["family"], other["family"]))

    def digest_of(kernel: Mapping[str, Any]) -> str:
        met = sorted(f"{other['name']} {other['cubin_sha256']}" for other in kernels if is_met(kernel, other))
        return hashlib.sha256("\n".join(met).encode()).hexdigest()

    return {f"kernels {kernel['name']}": digest_of(kernel) for kernel in kernels}


def of_families(folder: Path = _GATES / "families") -> dict[str, str]:
    """"family FAMILY" for every module in dhp_safe_fa/gates/families, with those of them that it imports."""
    modules, read = {path.stem: path for path in folder.glob("*.py")}, cache(without_comments)
    imports = {
        name: {
            module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.level == 1
            for module in ([node.module] if node.module else [alias.name for alias in node.names])
            if module in modules
        }
        for name, path in modules.items()
    }

    def closure(name: str, found: frozenset[str] = frozenset()) -> frozenset[str]:
        found |= {name}
        for module in imports[name] - found:
            found |= closure(module, found)
        return found

    return {
        f"family {name}": digest((modules[module] for module in closure(name)), folder, read)
        for name in sorted(modules)
        if name != "__init__"
    }


def of_controls(sources: Path = CONTROLS, unbranch: Path = UNBRANCH) -> str | None:
    """Of the checkout's sources, else as a wheel's build has written it down; None if there are no controls."""
    if sources.is_dir():
        step = unbranch.read_bytes() if unbranch.exists() else b""
        return hashlib.sha256(digest(_below(sources), sources, Path.read_bytes).encode() + step).hexdigest()
    manifest = PACKAGED / MANIFEST
    return str(json.loads(manifest.read_text())["sources"]) if manifest.exists() else None


def of_policy(path: Path = POLICY) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def of_gates(folder: Path = _GATES) -> dict[str, str]:
    """shared, "family FAMILY" and "gate NAME" for each of them; folder: dhp_safe_fa/gates."""
    shared = [path for path in folder.glob("*.py") if path.name not in _JUDGE_NOTHING]
    own = {f"gate {gate.name}": digest(_below(folder / gate.name), folder) for gate in GATES}
    return {"shared": digest(shared, folder), **of_families(folder / "families"), **own}


def here() -> dict[str, str | None]:
    """All parts as they are now in this build and on this disk."""
    from dhp_safe_fa import _inspect

    built, kernels = _inspect.build_info()["sources"]["launch"], _inspect.kernels()
    of_build = {**of_launch(built, kernels), **of_kernels(built, kernels)}
    return {**of_build, "controls": of_controls(), "policy": of_policy(), **of_gates()}
