"""Kernels compiled for the host, with stubs in place of their instructions: what tests/schedule and tests/emulated
share.

`CXX` names the compiler (default `c++`), `CC` that of C (default `cc`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SHARED_STUBS = ROOT / "tests" / "stubs"  # what the stubs of both folders are made of

sys.path.insert(0, str(CSRC / "kernels"))
import families as families  # noqa: E402  for whoever imports this file

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
C_COMPILER = shlex.split(os.environ.get("CC", "cc"))
# Warnings that only the host's compiler has for device sources.
OF_KERNELS = ["-Wno-parentheses", "-Wno-int-in-bool-context", "-Wno-missing-field-initializers", "-Wno-unknown-pragmas"]

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"no C++ compiler: {COMPILER[0]} was not found (CXX names another)"
)
needs_c = pytest.mark.skipif(
    shutil.which(C_COMPILER[0]) is None, reason=f"no C compiler: {C_COMPILER[0]} was not found (CC names another)"
)

Substitution = tuple[str, str]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    print(shlex.join(map(str, command)), result.stdout, result.stderr, sep="\n")
    return result


def compile_with(compiler: list[str], source: Path, target: Path, *options: str) -> Path:
    result = run(*compiler, *options, "-c", source, "-o", target)
    assert result.returncode == 0, result.stderr
    return target


def copy_sources(sources: list[Path], folder: Path, changes: tuple[Substitution, ...], stub: Path) -> Path:
    """These files of families, the headers beside them and those of csrc/hopper under `folder`, each change made in the
    one place where its text stands, and `stub` in place of ptx.cuh. Returns the copy of the first file's folder."""
    texts = {
        path.relative_to(CSRC): path.read_text()
        for part in dict.fromkeys((CSRC / "hopper", *(source.parent for source in sources)))
        for path in sorted(part.iterdir())
        if path.suffix in (".cuh", ".h") or path in sources
    }
    texts[Path("ct.h")] = (CSRC / "ct.h").read_text()
    for old, new in changes:
        # any white space stands for any other: how a macro's lines are aligned and continued does not matter
        pattern = re.compile(r"[\s\\]+".join(re.escape(word) for word in re.split(r"\s+", old)))
        places = [(path, found.span()) for path, text in texts.items() for found in pattern.finditer(text)]
        assert len(places) == 1, f"{len(places)} places have the text {old!r}; this test needs exactly one"
        path, (start, end) = places[0]
        texts[path] = texts[path][:start] + new + texts[path][end:]
    texts[Path("hopper/ptx.cuh")] = stub.read_text()
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder / sources[0].parent.relative_to(CSRC)
