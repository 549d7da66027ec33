"""Builds: the current one, and the kept ones that later iterations are compared with.

A kept build is a folder under build/burn/, named after its library's SHA-256, with the library, the header it was built
with, and its cubins. It is a cache: what is missing is built again from the commit of its record, and taken only if the
cubins come out as recorded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dhp_safe_fa.burn.builds.library import HEADER, LIBRARY, Library

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "build" / "burn"
# What decides the shipped machine code and how it is launched.
SOURCES = ("csrc", "setup.py")


class BuildFailed(Exception):
    """The text is for the user: which build, and what its tools said."""


def check_checkout() -> None:
    """BuildFailed unless this is a checkout, which has the sources to build."""
    if not (ROOT / "setup.py").exists() or not (ROOT / "csrc").is_dir():
        raise BuildFailed(f"burn builds kernels from a checkout, and {ROOT} has no csrc/: clone the project")


def commit() -> str:
    """The commit that the sources are at; in a copy without history, the one that DHP_SAFE_FA_COMMIT names.

    BuildFailed if they differ from it, or if there is none: a record has to be rebuildable.
    """
    if (ROOT / ".git").exists():
        if changed := git("status", "--porcelain", "--", *SOURCES):
            files = ", ".join(line.split(maxsplit=1)[1] for line in changed.splitlines()[:3])
            raise BuildFailed(f"uncommitted changes ({files}): commit them first, so that they can be built again")
        return git("rev-parse", "--verify", "HEAD")
    given = os.environ.get("DHP_SAFE_FA_COMMIT", "")
    if not re.fullmatch(r"[0-9a-f]{40}", given):
        raise BuildFailed(f"DHP_SAFE_FA_COMMIT is '{given}': without git history it has to name the commit, 40 digits")
    return given


def build_current() -> None:
    """Build the package in place. BuildFailed says what the tools said."""
    _build(ROOT, "the current sources")


def current() -> Library:
    """The library of the package as built, kept. BuildFailed if it has no kernel."""
    library = keep(ROOT / "dhp_safe_fa" / LIBRARY, ROOT / "csrc" / HEADER)
    if not library.kernels:
        raise BuildFailed("the build has no GPU kernels: nvcc was not found")
    return library


def keep(library: Path, header: Path, name: str | None = None) -> Library:
    """A copy under build/burn/, under its own hash or the given name, whole or not at all."""
    folder = KEPT / (name or hashlib.sha256(library.read_bytes()).hexdigest())
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            shutil.copy(library, new / LIBRARY)
            shutil.copy(header, new / HEADER)
            for kernel in Library(new).kernels:
                (new / f"{kernel.name}.cubin").write_bytes(kernel.cubin)
            new.rename(folder)
    return Library(folder)


def kept(name: str, library_sha256: str, commit_id: str, cubins: dict[str, str]) -> Library:
    """The build of a record, from the cache or built again from its commit.

    Args:
        name: the record's, for messages.
        cubins: kernel name → SHA-256, as recorded.

    Raises:
        BuildFailed: it is not in the cache and cannot be built, or what came out has other cubins.
    """
    folder = KEPT / library_sha256
    library = Library(folder) if folder.exists() else _build_again(name, library_sha256, commit_id)
    if library.cubins() != cubins:
        shutil.rmtree(folder)
        raise BuildFailed(
            f"'{name}': built from {commit_id[:12]}, the cubins are not those of its record (another nvcc?), so it "
            "cannot be compared with"
        )
    return library


def _build_again(name: str, library_sha256: str, commit_id: str) -> Library:
    if not (ROOT / ".git").exists():
        raise BuildFailed(f"'{name}': its build is not in {KEPT}, and without git history it cannot be built again")
    with tempfile.TemporaryDirectory() as temporary:
        folder, archive = Path(temporary), Path(temporary) / "sources.tar"
        git("archive", "--output", str(archive), commit_id)
        with tarfile.open(archive) as sources:
            if hasattr(tarfile, "data_filter"):  # not in the first 3.10 and 3.11; 3.12 warns without
                sources.extraction_filter = tarfile.data_filter
            sources.extractall(folder)
        _build(folder, f"'{name}', commit {commit_id[:12]},")
        return keep(folder / "dhp_safe_fa" / LIBRARY, folder / "csrc" / HEADER, library_sha256)


def _build(folder: Path, what: str) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildFailed(f"{what} cannot be built:\n{(result.stdout + result.stderr).strip()}")


def git(*arguments: str) -> str:
    """What git prints about this checkout, stripped. BuildFailed if it fails."""
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildFailed(f"git {arguments[0]} failed: {result.stderr.strip()}")
    return result.stdout.strip()
