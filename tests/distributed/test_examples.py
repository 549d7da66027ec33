"""The examples of docs/distributed.md run, under torchrun and as the page has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"^ {4}torchrun (--nproc-per-node 2) (docs/examples/\w+\.py)$", re.M)
EXAMPLES = COMMAND.findall((ROOT / "docs" / "distributed.md").read_text())


@pytest.mark.parametrize(("processes", "example"), EXAMPLES, ids=[Path(example).stem for _, example in EXAMPLES])
def test_example(processes: str, example: str) -> None:
    assert f"torchrun {processes} {example}" in (ROOT / example).read_text()
    # A port of its own, and the interface of a machine without a network.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *processes.split(), example]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d):", done.stdout)) == ["0", "1"]


def test_all_are_named() -> None:
    scripts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "examples").glob("*.py")}
    assert scripts == {example for _, example in EXAMPLES}
