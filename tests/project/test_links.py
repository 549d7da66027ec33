"""Whatever the documents name exists: links, anchors, files and folders of the project, targets of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "audits/*.md", "benchmarks/*.md")
DOCUMENTS = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern))
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:csrc|dhp_safe_fa|tests|docs|benchmarks|audits|\.ci)/[\w./*-]*")
# Written by runs on a Hopper GPU: a checkout whose kernels were not measured has none.
MEASURED = {f"audits/{name}" for name in ("evidence.json", "peers.md", "iterations.jsonl", "iterations.png")}
MAKE = re.compile(r"(?:^    |`)make ([a-z-]+)", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, by GitHub's rule: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document: Path, text: str) -> list[str]:
    """What the text, as if it stood in the document, names and the project does not have."""
    wrong = []
    for link in LINK.findall(text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            wrong.append(f"link {link}")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"link {link}: no such heading")
    for code in CODE.findall(text):
        is_named = PATH.fullmatch(code) and "NAME" not in code  # NAME: of a recipe, for whatever is added
        if is_named and code not in MEASURED and not list(ROOT.glob(code.rstrip("/"))):
            wrong.append(f"file {code}")
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    wrong += [f"make {target}" for target in MAKE.findall(text) if target not in targets]
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    assert not broken(document, document.read_text())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[licence](LICENSE), [speed](#speed), `csrc/check.c`, `tests/`, `csrc/*.c`, `make test`, https://x.y/z", []),
        ("[a](docs/nothing.md)", ["link docs/nothing.md"]),
        ("[a](#nothing)", ["link #nothing: no such heading"]),
        ("`csrc/nothing.c`", ["file csrc/nothing.c"]),
        ("    make nothing", ["make nothing"]),
        ("    make test-short", ["make test-short"]),
    ],
)
def test_a_broken_name_is_found(text: str, wrong: list[str]) -> None:
    assert broken(ROOT / "README.md", text) == wrong
