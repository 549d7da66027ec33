"""Every Python block of README.md and docs/*.md runs: the blocks of a page in order, in one namespace. An example of
training ends in the same parameters whenever it is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dhp_safe_fa

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(path.read_text())]
EXAMPLE = ROOT / "docs" / "examples" / "tensor_parallel.py"
# Continuous batching of an older transformers refuses our name.
OLDEST_TRANSFORMERS = {"serving.md": "5.23"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write files
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # or start a group of processes, also without a network
    if page.name in OLDEST_TRANSFORMERS:
        pytest.importorskip("transformers", minversion=OLDEST_TRANSFORMERS[page.name])
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


def test_pages_with_examples() -> None:
    """The search above finds what it is meant to find."""
    assert {"README.md", "api.md"} <= {page.name for page in PAGES}
    fences = sum(len(re.findall(r"^```py", page.read_text(), re.M)) for page in PAGES)
    assert fences == sum(len(BLOCK.findall(page.read_text())) for page in PAGES), "a block that is not run"


def test_example_ends_in_the_same_parameters(tmp_path: Path) -> None:
    """By the command that it names, twice at a time, each with a port of its own."""
    command = re.findall(rf"^    torchrun (.*) docs/examples/{EXAMPLE.name}$", EXAMPLE.read_text(), re.M)
    assert len(command) == 1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[0].split(), str(EXAMPLE)]
    package = str(Path(dhp_safe_fa.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / "one", tmp_path / "other"]
    runs = []
    for log in logs:
        with open(log, "w") as file:
            runs.append(subprocess.Popen(torchrun, env=environment, stdout=subprocess.PIPE, stderr=file, text=True))
    said = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(log.read_text() for log in logs)
    digests = re.findall(r"^rank [01]: parameters (\w{64})$", "".join(said), re.M)
    assert len(digests) == 4 and len(set(digests)) == 1
