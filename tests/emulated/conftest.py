"""Emulators, each built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from compiling import families
from emulated import Emulator, build, build_gradients, compile_host


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_host(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="session")
def emulators(tmp_path_factory: pytest.TempPathFactory, host: list[Path]) -> Callable[[families.Kernel], Emulator]:
    """That of a kernel."""
    return cache(lambda kernel: build(tmp_path_factory.mktemp(kernel.name), kernel, host))


@pytest.fixture(scope="session")
def gradient_emulators(tmp_path_factory: pytest.TempPathFactory, host: list[Path]) -> Callable[[int], Emulator]:
    """That of the kernels that serve a head_dim."""
    return cache(lambda head_dim: build_gradients(tmp_path_factory.mktemp(f"gradients_{head_dim}"), head_dim, host))
