"""docs/audit-your-kernel.md: its commands run, and print what it says they print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dhp_safe_fa.gates import controls, tools

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "audit-your-kernel.md"
CUT = "…"


def steps() -> Iterator[tuple[str, list[str]]]:
    """Each command of the page (`    $ …`) and the lines of output below it, without those that mark a cut."""
    lines = [line[4:] for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start][2:], [line for line in lines[start + 1 : end] if line != CUT]


def squeeze(text: str) -> str:
    """One line, single spaces: width and line breaks depend on where this runs."""
    return " ".join(text.split())


def test_page_has_commands_and_output() -> None:
    assert [command.split()[0] for command, _ in steps()].count("nvcc") == 3
    assert sum(len(output) for _, output in steps()) > 8


@pytest.mark.long
def test_commands_print_what_the_page_says(tmp_path: Path) -> None:
    nvcc = controls.find_nvcc()
    if nvcc is None or "13.0" not in tools.nvcc_version(nvcc):
        pytest.skip("the page's figures are those of nvcc 13.0, which is not here")
    try:
        disassembler = tools.find("nvdisasm")
    except tools.NotRun as error:
        pytest.skip(str(error))
    for name, path in (("python", Path(sys.executable)), ("nvdisasm", disassembler)):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{path}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "build").mkdir()
    for name in ("audits", "csrc", "dhp_safe_fa", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(tmp_path), str(nvcc.parent), os.environ["PATH"]])
    for command, expected in steps():
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        said = squeeze(result.stdout + result.stderr).replace(f"{tmp_path}/", "")
        for line in expected:
            _, found, said = said.partition(squeeze(line))
            assert found, f"{command}\nshould print, in this order: {line}\nprinted:\n{result.stdout}{result.stderr}"
        verdict = {"FAIL": 1, "PASS": 0}[expected[-1]] if expected else 0
        assert result.returncode == verdict, result.stdout + result.stderr
