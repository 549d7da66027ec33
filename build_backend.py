"""The build backend: setuptools', plus torch as a build requirement, but only where there is none to build against.

An isolated build does not see the packages of the environment that it is for, and torch is far too large to be fetched
for its headers alone. So the environment is searched first: `pip install .` fetches nothing if it has torch >= 2.10.
Any such torch will do, because the shim uses the stable ABI of 2.10 and runs with every later one, and because there is
no Python in what it links: DHP_SAFE_FA_TORCH names the folder of one, if wheels are built for Pythons that have none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "find_torch",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

OLDEST_TORCH = (2, 10)  # the first whose stable ABI has all that csrc/torch calls
REQUIREMENT = "torch>=2.10"


def _version(folder: Path) -> tuple[int, ...]:
    """torch's version without importing it; () if the folder holds no torch."""
    file = folder / "version.py"
    match = re.search(r"^__version__ = '(\d+)\.(\d+)", file.read_text(), re.MULTILINE) if file.exists() else None
    return tuple(map(int, match.groups())) if match else ()


def find_torch() -> Path | None:
    """The folder of a torch >= 2.10: DHP_SAFE_FA_TORCH, else of this interpreter's path, else of the environment that
    an isolated build is for or of the interpreter under it; None without one."""
    named = os.environ.get("DHP_SAFE_FA_TORCH")
    if named and _version(Path(named)) < OLDEST_TORCH:
        raise SystemExit(f"DHP_SAFE_FA_TORCH={named}: holds no {REQUIREMENT}; it names an installed torch's folder")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("torch")
    folders = [Path(spec.origin).parent] if spec and spec.origin else []
    packages = [*site.getsitepackages([sys.prefix, sys.base_prefix]), site.getusersitepackages()]
    folders += [Path(folder) / "torch" for folder in packages]
    return next((folder for folder in folders if _version(folder) >= OLDEST_TORCH), None)


def _torch() -> list[str]:
    return [] if find_torch() else [REQUIREMENT]


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]
