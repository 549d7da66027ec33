"""What is installed is compared with what was built: every kind of change is found, and named."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import load

import dhp_safe_fa.__main__ as report
from dhp_safe_fa import evidence, verify

ROOT = Path(__file__).resolve().parents[2]
build_record = load(ROOT / "build_record.py")
CUBINS = {"first": b"\x7fELF first machine code", "second": b"\x7fELF second machine code"}
LIBRARIES = ("libdhp_fa.so", "libdhp_torch.so", "_inspect.so")
SOURCES = {"all": "5" * 64, "launch": "6" * 64}
TOOLS = {"nvcc": "13.0.88", "cc": "cc 12", "python": "3.11.7", "torch": "2.13.0", "pybind11": "3.1.0"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package as a wheel leaves it: three libraries, two cubins in the first, evidence about both, a RECORD."""
    package, cubins = tmp_path / "dhp_safe_fa", tmp_path / "cubins"
    (package / "audits").mkdir(parents=True)
    cubins.mkdir()
    for name, cubin in CUBINS.items():
        (cubins / f"{name}.cubin").write_bytes(cubin)
    for name in LIBRARIES:
        (package / name).write_bytes(b"code " + b" data ".join(CUBINS.values()) + b" end")
    shutil.copy2(verify.__file__, package)
    kernels = {name: {"cubin_sha256": sha256(cubin)} for name, cubin in CUBINS.items()}
    (package / "audits" / "evidence.json").write_text(json.dumps({"kernels": kernels}))
    libraries = [package / name for name in LIBRARIES]
    stored = verify.evidence_file(package)
    build_record.write(
        build_record.provenance(tmp_path, "1.2.3", libraries, cubins.glob("*"), stored, SOURCES, TOOLS),
        verify.provenance_file(package),
    )
    info = tmp_path / "dhp_safe_fa-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dhp_safe_fa\nVersion: 1.2.3\n")
    lines = [f"{info.name}/RECORD,,"]
    for path in [*package.rglob("*"), info / "METADATA"]:
        if path.is_file():
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(tmp_path).as_posix()},sha256={digest},{path.stat().st_size}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return package


def broken(package: Path) -> set[tuple[str, str]]:
    return {(check.part, check.name) for check in verify.files(package) if check.state == verify.BROKEN}


def test_what_was_not_touched_holds(package: Path) -> None:
    checks = verify.files(package)
    assert verify.holds(checks) and {check.state for check in checks} == {verify.HOLDS}
    names = {part: [check.name for check in checks if check.part == part] for part in ("library", "kernel", "evidence")}
    assert names == {"library": [*LIBRARIES], "kernel": [*CUBINS], "evidence": ["evidence.json", *CUBINS]}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def in_library(package: Path) -> None:
    flip(package / "libdhp_fa.so", 2)


def in_cubin(package: Path) -> None:
    library = package / "libdhp_fa.so"
    flip(library, library.read_bytes().find(CUBINS["second"]) + 9)


def in_evidence(package: Path) -> None:
    path = verify.evidence_file(package)
    flip(path, path.read_bytes().find(sha256(CUBINS["first"]).encode()))


def in_a_script(package: Path) -> None:
    flip(package / "verify.py", 5)


def library_missing(package: Path) -> None:
    (package / "libdhp_fa.so").unlink()


def evidence_missing(package: Path) -> None:
    verify.evidence_file(package).unlink()


def provenance_missing(package: Path) -> None:
    verify.provenance_file(package).unlink()


def record_missing(package: Path) -> None:
    (package.parent / "dhp_safe_fa-1.2.3.dist-info" / "RECORD").unlink()


def added(package: Path) -> None:
    (package / "more.py").touch()


RECORD = "RECORD"
LIBRARY = (RECORD, "dhp_safe_fa/libdhp_fa.so"), ("library", "libdhp_fa.so")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (in_library, {*LIBRARY}),
        (in_cubin, {*LIBRARY, ("kernel", "second")}),
        (in_evidence, {(RECORD, "dhp_safe_fa/audits/evidence.json"), ("evidence", "evidence.json")}),
        (in_a_script, {(RECORD, "dhp_safe_fa/verify.py")}),
        (library_missing, {*LIBRARY, ("kernel", "first"), ("kernel", "second")}),
        (
            evidence_missing,
            {(RECORD, "dhp_safe_fa/audits/evidence.json"), ("evidence", "evidence.json")},
        ),
        (provenance_missing, {(RECORD, "dhp_safe_fa/provenance.json"), ("provenance", "provenance.json")}),
        (record_missing, {(RECORD, "")}),
        (added, {(RECORD, "dhp_safe_fa/more.py")}),
    ],
)
def test_a_change_is_found_and_named(package: Path, change: Callable[[Path], None], named: set[Any]) -> None:
    change(package)
    assert broken(package) == named


def test_a_change_is_found_without_record(package: Path) -> None:
    """Of somebody who writes RECORD anew, too: the build's own words are left."""
    in_cubin(package)
    in_evidence(package)
    record_missing(package)
    assert broken(package) == {(RECORD, ""), LIBRARY[1], ("kernel", "second"), ("evidence", "evidence.json")}


def test_evidence_about_other_code_is_no_fault(package: Path) -> None:
    stored = verify.evidence_file(package)
    stored.write_text(json.dumps({"kernels": {"first": {"cubin_sha256": "0" * 64}}}))
    built = json.loads(verify.provenance_file(package).read_text())
    built["evidence"] = sha256(stored.read_bytes())
    verify.provenance_file(package).write_text(json.dumps(built))
    found = {check.name: (check.state, check.detail) for check in verify.files(package) if check.part == "evidence"}
    assert found["first"] == (verify.NOT_SHOWN, "is about other machine code")
    assert found["second"] == (verify.NOT_SHOWN, "does not name this kernel")
    assert found["evidence.json"][0] == verify.HOLDS


def test_new_evidence_in_a_checkout_is_no_fault(package: Path) -> None:
    """`gates evidence` writes it and git brings it, after the build. If it is missing, something is wrong."""
    root = package.parent
    built = verify.provenance_file(package)
    (root / "csrc").mkdir()
    (root / "csrc" / "dhp_fa.h").touch()
    shutil.move(package / "audits", root / "audits")
    (root / "build").mkdir()
    shutil.move(built, root / "build" / "provenance.json")

    def found() -> dict[str, str]:
        return {one.name: one.state for one in verify.files(package) if one.part == "evidence"}

    assert found()["evidence.json"] == verify.HOLDS
    in_evidence(package)
    assert found()["evidence.json"] == verify.NOT_SHOWN
    evidence_missing(package)
    assert found()["evidence.json"] == verify.BROKEN


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "another"}', "\xff"])
def test_unusable_provenance_is_named(package: Path, content: str) -> None:
    verify.provenance_file(package).write_text(content, encoding="latin-1")
    assert ("provenance", "provenance.json") in broken(package)


def test_what_is_loaded_is_compared(package: Path) -> None:
    assert verify.holds(verify.loaded(package, CUBINS, SOURCES["all"], SOURCES["all"]))
    assert verify.holds(verify.loaded(package, CUBINS, SOURCES["all"], None))
    other = {"first": b"other", "third": b""}
    found = {check.name for check in verify.loaded(package, other, "7" * 64, "8" * 64) if check.state == verify.BROKEN}
    assert found == {"first", "second", "third", "sources", "sources here"}


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As its user would where nothing of the package can be imported: the file itself, without this environment."""
    command = [sys.executable, "-I", str(package / "verify.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})


def test_the_file_alone_says_what_holds(package: Path) -> None:
    result = run(package)
    assert result.returncode == 0 and result.stdout.endswith("as it was built\n") and not result.stderr
    in_cubin(package)
    result = run(package)
    assert result.returncode == 1 and "  BROKEN     kernel second: its SHA-256 is " in result.stdout
    assert result.stdout.endswith("NOT as it was built: install it again from a source you trust\n")
    result = run(package, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 1 and found["holds"] is False
    states = {check["name"]: check["state"] for check in found["checks"] if check["part"] == "kernel"}
    assert states == {"first": verify.HOLDS, "second": verify.BROKEN}


@pytest.mark.parametrize("command", ["dhp_safe_fa --json", "dhp_safe_fa --verify", "dhp_safe_fa.burn log"])
def test_a_reader_who_leaves_is_no_error(command: str) -> None:
    """As `head` does: what is written after it is nobody's, and no verdict."""
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, "-m", *command.split()], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (2, "")


def test_this_build_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--verify", "--json"]) == 0, capsys.readouterr().out
    checks = json.loads(capsys.readouterr().out)["checks"]
    kernels = evidence.held().keys()
    for part in ("kernel", "loaded"):
        assert kernels <= {check["name"] for check in checks if check["part"] == part}
    assert verify.evidence_file(Path(verify.__file__).parent) == evidence.find()


def test_a_library_that_does_not_load_names_the_check(tmp_path: Path) -> None:
    copy = tmp_path / "dhp_safe_fa"
    shutil.copytree(Path(verify.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "libdhp_fa.so").write_bytes(b"no library")
    result = subprocess.run(
        [sys.executable, "-c", "import dhp_safe_fa"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 1 and f"`python {copy / 'verify.py'}` says whether" in result.stderr


# ---- what the build writes down --------------------------------------------------------------------------------------


def test_components_are_all_listed_and_no_time_is(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = json.loads(verify.provenance_file(package).read_text())
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    listed = build_record.sbom(built, ["torch>=2.10", "numpy"])
    assert listed == build_record.sbom(built, ["numpy", "torch>=2.10"]) and "timestamp" not in listed["metadata"]
    names = [each["name"] for each in listed["components"]]
    assert names == [*(f"dhp_safe_fa/{name}" for name in LIBRARIES), "numpy", "torch", "pybind11"]
    cubins = {each["name"]: each["hashes"][0]["content"] for each in listed["components"][0]["components"]}
    assert cubins == {f"{name}.cubin": sha256(cubin) for name, cubin in CUBINS.items()}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert build_record.sbom(built, [])["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"


def test_a_library_without_its_cubin_is_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"nothing")
    (tmp_path / "first.cubin").write_bytes(CUBINS["first"])
    with pytest.raises(ValueError, match=r"lib\.so does not hold first\.cubin"):
        build_record.kernels_in(tmp_path / "lib.so", [tmp_path / "first.cubin"])


def test_schema_is_the_one_that_is_read() -> None:
    assert build_record.SCHEMA == verify.SCHEMA
