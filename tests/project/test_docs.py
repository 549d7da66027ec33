"""Every Python block of README.md and docs/*.md runs: the blocks of a page in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(path.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write files
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # or start a group of processes, also without a network
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
