"""What a build says of itself: its provenance, and a list of what is in the wheel (SBOM, CycloneDX 1.6).

    provenance.json                     in the package: sources, tools, SHA-256 of libraries, cubins, evidence
    .dist-info/sboms/dhp_safe_fa.cdx.json
                                        the same as components, and what is required or compiled in (PEP 770)

Nothing in them differs between two builds of the same sources with the same tools; a time is there only if
SOURCE_DATE_EPOCH says which.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SCHEMA = "dhp_safe_fa.provenance/1"
PROVENANCE, SBOM = "provenance.json", "dhp_safe_fa.cdx.json"


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit_of(root: Path) -> dict[str, Any]:
    """commit, and dirty if tracked files differ from it. A copy without history takes DHP_SAFE_FA_COMMIT, and cannot
    say if it is dirty (as dhp_safe_fa.bench.environment)."""
    commit = _output("git", "-C", str(root), "rev-parse", "--verify", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return {"commit": os.environ.get("DHP_SAFE_FA_COMMIT") or None, "dirty": None}
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def compiler(command: str) -> str:
    """The first line of what a compiler says of its version."""
    return (_output(command, "--version") or "unknown").splitlines()[0]


def torch_version(folder: Path) -> str:
    """Of the torch whose headers the shim was compiled with."""
    match = re.search(r"^__version__ = '(.+)'$", (folder / "version.py").read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


def pybind11_version(include: Iterable[str]) -> str:
    """Of the pybind11 that a compiler finds first in these folders."""
    for folder in include:
        header = Path(folder) / "pybind11" / "detail" / "common.h"
        if header.is_file():
            define = r"^#\s*define PYBIND11_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\S+)"
            return ".".join(re.findall(define, header.read_text(), re.MULTILINE))
    return "unknown"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kernels_in(library: Path, cubins: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """By name, the SHA-256 of each cubin, and where in the library's file its bytes lie. ValueError if they do not."""
    content, found = library.read_bytes(), {}
    for path in sorted(cubins):
        cubin = path.read_bytes()
        offset = content.find(cubin)
        if offset < 0:
            raise ValueError(f"{library.name} does not hold {path.name}")
        found[path.stem] = {"sha256": _sha256(path), "offset": offset, "size": len(cubin)}
    return found


def provenance(
    root: Path, version: str, libraries: list[Path], cubins: Iterable[Path], evidence: Path,
    sources: Mapping[str, Any], tools: Mapping[str, str | None],
) -> dict[str, Any]:
    """libraries: as they were built, the one that embeds the cubins first. tools: name to version, None without it."""
    return {
        "schema": SCHEMA,
        "version": version,
        **commit_of(root),
        "sources": dict(sources),
        "tools": dict(tools),
        "libraries": {path.name: _sha256(path) for path in libraries},
        "kernels": kernels_in(libraries[0], cubins),
        "evidence": _sha256(evidence) if evidence.is_file() else None,
    }


def write(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


# ---- the list of components ------------------------------------------------------------------------------------------


def _file(name: str, sha256: str) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": sha256}]
    return {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": hashes}


def _library(requirement: str, version: str | None = None, license_id: str | None = None) -> dict[str, Any]:
    """A package that is required (with any version that the requirement allows) or whose code was compiled in."""
    name = re.split(r"[^\w.-]", requirement)[0]
    found: dict[str, Any] = {"type": "library", "bom-ref": f"pypi:{name}", "name": name}
    found |= {"purl": f"pkg:pypi/{name}" + (f"@{version}" if version else "")}
    if version:
        found |= {"version": version, "description": "headers, compiled in"}
    else:
        found |= {"scope": "required", "properties": [{"name": "dhp_safe_fa:requires", "value": requirement}]}
    return found | ({"licenses": [{"license": {"id": license_id}}]} if license_id else {})


def sbom(built: Mapping[str, Any], requires: Iterable[str]) -> dict[str, Any]:
    """CycloneDX of a build's provenance. requires: what the installed package needs, torch among them."""
    version, tools = built["version"], built["tools"]
    root = f"pkg:pypi/dhp-safe-fa@{version}"
    libraries = [_file(f"dhp_safe_fa/{name}", sha256) for name, sha256 in built["libraries"].items()]
    cubins = [_file(f"{name}.cubin", kernel["sha256"]) for name, kernel in built["kernels"].items()]
    if cubins:
        libraries[0]["components"] = cubins
    required = [_library(each) for each in sorted(requires)]
    compiled_in = _library("pybind11", tools["pybind11"], "BSD-3-Clause")
    metadata: dict[str, Any] = {
        "component": {
            "type": "library", "bom-ref": root, "name": "dhp_safe_fa", "version": version, "purl": root,
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        },
        "tools": {
            "components": [
                {"type": "application", "name": name, "version": value} for name, value in tools.items() if value
            ]
        },
        "properties": [
            {"name": "dhp_safe_fa:commit", "value": built["commit"] or "unknown"},
            {"name": "dhp_safe_fa:sources_sha256", "value": built["sources"]["all"]},
        ],
    }
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        metadata = {"timestamp": datetime.fromtimestamp(int(epoch), timezone.utc).isoformat(), **metadata}
    components = [*libraries, *required, compiled_in]
    parts = [each["bom-ref"] for each in components]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": metadata,
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": parts}, *({"ref": part} for part in parts)],
    }
