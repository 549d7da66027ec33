"""Whether what is installed is what was built: every file is hashed again, and compared with what the build wrote down.

    python -m dhp_safe_fa --verify             # the files, and what the library holds that was loaded
    python PATH/TO/dhp_safe_fa/verify.py       # the files alone, without loading anything: also where the import fails

Compared are all installed files with pip's RECORD, and libraries, cubins and evidence with provenance.json. Both lie
beside what they speak of: this finds accidents and careless changes, not somebody who changes them too (docs/faq.md).
Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

SCHEMA = "dhp_safe_fa.provenance/1"
HOLDS, BROKEN, NOT_SHOWN = "holds", "BROKEN", "not shown"
LIBRARY = "libdhp_fa.so"  # the one that embeds the cubins
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Check:
    """part: RECORD, provenance, library, kernel, evidence or loaded; state: holds, BROKEN or not shown."""

    part: str
    name: str
    state: str
    detail: str


def is_checkout(package: Path) -> bool:
    """The sources lie around the package: pip has written no RECORD of it, and git knows what was committed."""
    return (package.parent / "csrc" / "dhp_fa.h").is_file()


def provenance_file(package: Path) -> Path:
    """Where the build has written it: a wheel carries it in the package, a checkout keeps it among what is built."""
    return package.parent / "build" / "provenance.json" if is_checkout(package) else package / "provenance.json"


def evidence_file(package: Path) -> Path:
    return (package.parent if is_checkout(package) else package) / "audits" / "evidence.json"


def _sha256(path: Path) -> str | None:
    """None if the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _compare(part: str, name: str, found: str | None, wanted: str, who: str) -> Check:
    if found is None:
        return Check(part, name, BROKEN, "missing, or not readable")
    if found != wanted:
        return Check(part, name, BROKEN, f"its SHA-256 is {found[:12]}…, {who} says {wanted[:12]}…")
    return Check(part, name, HOLDS, f"sha256 {found[:16]}")


def record(package: Path) -> list[Check]:
    """Every file that pip installed, by its RECORD: one line if all hold, else one for each that does not."""
    found = next((each for each in distributions(name="dhp_safe_fa", path=[str(package.parent)])), None)
    text = found.read_text("RECORD") if found else None
    if text is None:
        if is_checkout(package):
            return [Check("RECORD", "", NOT_SHOWN, "a checkout has none: `git status` compares its files")]
        return [Check("RECORD", "", BROKEN, "there is none: not installed by pip, or it was removed")]
    checks, listed = [], set()
    for name, digest, *_ in filter(None, csv.reader(text.splitlines())):
        path = package.parent / name
        listed.add(path)
        if digest:  # RECORD has none of itself, nor of what Python compiles
            wanted = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==").hex()
            checks.append(_compare("RECORD", name, _sha256(path), wanted, "RECORD"))
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path not in listed:
            name = path.relative_to(package.parent).as_posix()
            checks.append(Check("RECORD", name, BROKEN, "was not installed: RECORD does not name it"))
    broken = [check for check in checks if check.state == BROKEN]
    return broken or [Check("RECORD", "", HOLDS, f"{len(checks)} files are as they were installed")]


def _load(path: Path, part: str) -> tuple[dict[str, Any], list[Check]]:
    """A JSON object; {} and what is wrong if it is none."""
    try:
        content = json.loads(path.read_bytes())
        return (content, []) if isinstance(content, dict) else ({}, [Check(part, path.name, BROKEN, "no JSON object")])
    except (OSError, ValueError) as error:
        return {}, [Check(part, path.name, BROKEN, f"cannot be read: {error}")]


def provenance(package: Path) -> tuple[dict[str, Any], list[Check]]:
    """What the build has written down; {} and what is wrong if it cannot be used."""
    path = provenance_file(package)
    content, wrong = _load(path, "provenance")
    if wrong or content.get("schema") == SCHEMA:
        return content, wrong
    return {}, [Check("provenance", path.name, BROKEN, f"its schema is {content.get('schema')!r}, not {SCHEMA!r}")]


def _kernel_in_evidence(measured: Mapping[str, Any], name: str, sha256: str) -> Check:
    known = measured.get(name, {}).get("cubin_sha256")
    if known == sha256:
        return Check("evidence", name, HOLDS, "is about these bytes")
    about = "does not name this kernel" if known is None else "is about other machine code"
    return Check("evidence", name, NOT_SHOWN, about)


def files(package: Path = _PACKAGE) -> list[Check]:
    """Compares every file, without loading one. A cubin is read at its place in the library's file."""
    built, checks = provenance(package)
    checks = record(package) + checks
    if not built:
        return checks
    checks.append(Check("provenance", provenance_file(package).name, HOLDS, f"of commit {built['commit']}"))
    for name, sha256 in built["libraries"].items():
        checks.append(_compare("library", name, _sha256(package / name), sha256, "the build"))
    library = package / LIBRARY
    content = library.read_bytes() if library.is_file() else b""
    for name, kernel in built["kernels"].items():
        cubin = content[kernel["offset"] : kernel["offset"] + kernel["size"]]
        found = hashlib.sha256(cubin).hexdigest() if len(cubin) == kernel["size"] else None
        checks.append(_compare("kernel", name, found, kernel["sha256"], "the build"))
    if built["evidence"] is None:
        checks.append(Check("evidence", "", NOT_SHOWN, "there was none when this was built"))
        return checks
    stored = evidence_file(package)
    check = _compare("evidence", stored.name, _sha256(stored), built["evidence"], "the build")
    if is_checkout(package) and check.state == BROKEN and stored.is_file():
        # after the build: `gates evidence` writes it, git brings it
        check = Check("evidence", stored.name, NOT_SHOWN, "has changed since the build: `make build`")
    checks.append(check)
    evidence, wrong = _load(stored, "evidence")
    measured = evidence.get("kernels", {})
    checks += wrong or [_kernel_in_evidence(measured, name, k["sha256"]) for name, k in built["kernels"].items()]
    return checks


def loaded(package: Path, kernels: Mapping[str, bytes], sources: str, here: str | None) -> list[Check]:
    """Compares what the running process has loaded: its cubins by name, the digest of the sources it was built from,
    and of those that lie around it (None without a checkout)."""
    built, wrong = provenance(package)
    if wrong:
        return []  # files() has said so
    wanted = {name: kernel["sha256"] for name, kernel in built["kernels"].items()}
    checks = []
    for name in sorted(wanted.keys() | kernels.keys()):
        if name not in wanted:
            checks.append(Check("loaded", name, BROKEN, "the build knows no such kernel"))
            continue
        found = hashlib.sha256(kernels[name]).hexdigest() if name in kernels else None
        checks.append(_compare("loaded", name, found, wanted[name], "the build"))
    checks.append(_compare("loaded", "sources", sources, built["sources"]["all"], "the build"))
    if here not in (None, sources):
        checks.append(Check("loaded", "sources here", BROKEN, "have changed since the build: `make build`"))
    return checks


def holds(checks: Iterable[Check]) -> bool:
    return all(check.state != BROKEN for check in checks)


def show(checks: list[Check], package: Path, as_json: bool) -> int:
    """Prints every check and a verdict; 0 if nothing is broken, else 1."""
    good = holds(checks)
    if as_json:
        print(json.dumps({"package": str(package), "holds": good, "checks": [asdict(c) for c in checks]}, indent=2))
        return 0 if good else 1
    print(f"dhp_safe_fa in {package}")
    for check in checks:
        print(f"  {check.state:9}  {check.part} {check.name}".rstrip() + f": {check.detail}")
    count = {state: sum(check.state == state for check in checks) for state in (HOLDS, BROKEN, NOT_SHOWN)}
    print(", ".join(f"{number} {state}" for state, number in count.items()))
    print("as it was built" if good else "NOT as it was built: install it again from a source you trust")
    return 0 if good else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Is the installed dhp_safe_fa what was built? 0 yes, 1 no.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return show(files(), _PACKAGE, parser.parse_args(arguments).json)


if __name__ == "__main__":
    sys.exit(main())
