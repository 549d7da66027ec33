"""The source archive is whole, and a wheel built from it without nvcc works by itself.

.ci/package builds the wheel with GPU kernels and tries it in a fresh environment; here is what is quick.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from loading import load

import dhp_safe_fa
from dhp_safe_fa import evidence

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["audits", "benchmarks", "csrc", "dhp_safe_fa", "docs", "tests", ".ci"]
FILES = ["*.md", "*.py", "*.toml", "*.in", "Dockerfile", "LICENSE", "Makefile", ".clang-format", ".*ignore"]


check_wheel = load(ROOT / ".ci" / "check_wheel.py")
build_backend = load(ROOT / "build_backend.py")


def files_of_the_project() -> set[str]:
    """Everything that is not built: what git would track, found without git, which a source archive does not have."""
    found = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    found |= {path for pattern in FILES for path in ROOT.glob(pattern)}
    return {str(path.relative_to(ROOT)) for path in found if path.suffix not in (".so", ".pyc")}


# As pyproject_hooks, in pip from 24.1 on: whatever is imported is looked for in the source folder before all else.
FRONT_END = """
import os, sys
from importlib.machinery import PathFinder

class SourceFolder:
    def find_spec(self, name, path=None, target=None):
        return None if "." in name else PathFinder.find_spec(name, [os.getcwd()])

sys.meta_path.insert(0, SourceFolder())
import build_backend
getattr(build_backend, sys.argv[1])(sys.argv[2])
"""


def backend(hook: str, folder: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a hook of the build backend as a build front end does: in the source folder, in a process of its own."""
    command = [sys.executable, "-c", FRONT_END, hook, str(out)]
    result = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source archive, made from a copy, because setuptools leaves an egg-info folder where it works."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("sdist")
    for name in files_of_the_project():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
        (copy / name).chmod((ROOT / name).stat().st_mode)
    backend("build_sdist", copy, out)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in the first 3.10 and 3.11; 3.12 warns without
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(out)
    return out / f"dhp_safe_fa-{dhp_safe_fa.__version__}"


def test_source_archive_is_whole(sdist: Path) -> None:
    missing = {name for name in files_of_the_project() if not (sdist / name).exists()}
    assert not missing
    assert not list(sdist.rglob("*.so")) and not list(sdist.rglob("*.pyc"))


@pytest.fixture(scope="module")
def cpu_wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A wheel built from the archive where there is no nvcc; and what the build said."""
    out = tmp_path_factory.mktemp("wheel")
    (sdist / "build").mkdir()  # as after an earlier build; no module may have this name
    result = backend("build_wheel", sdist, out, CUDA_HOME=str(out))
    (wheel,) = out.glob("*.whl")
    return wheel, result.stderr


@pytest.mark.long
def test_build_without_nvcc_says_so(cpu_wheel: tuple[Path, str]) -> None:
    out, said = cpu_wheel[0].parent, cpu_wheel[1]
    sought = f"CUDA_HOME ({out}), and nothing else is looked at while that is set"
    assert f"nvcc was not found ({sought}): building CPU-only" in said


@pytest.mark.long
def test_wheel_holds_what_it_should(cpu_wheel: tuple[Path, str]) -> None:
    assert cpu_wheel[0].name.startswith(f"dhp_safe_fa-{dhp_safe_fa.__version__}-")
    assert not check_wheel.check(cpu_wheel[0], has_kernels=False)
    with zipfile.ZipFile(cpu_wheel[0]) as wheel:
        packaged = evidence.PACKAGED.relative_to(ROOT).as_posix()
        assert wheel.read(packaged) == (ROOT / "audits" / "evidence.json").read_bytes()


@pytest.mark.long
def test_wheel_works_without_compiler(cpu_wheel: tuple[Path, str], tmp_path: Path) -> None:
    with zipfile.ZipFile(cpu_wheel[0]) as wheel:
        wheel.extractall(tmp_path)
    result = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "smoke.py")],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "built without nvcc" in result.stdout


def test_shim_leads_to_the_stream_of_any_torch() -> None:
    """The shim needs libtorch, which leads to libtorch_cuda where there is one, and names no CUDA library itself."""
    shim = Path(dhp_safe_fa.__file__).with_name("libdhp_torch.so")
    listing = subprocess.run(["readelf", "-d", str(shim)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", listing))
    assert {"libtorch.so", "libtorch_cpu.so", "libdhp_fa.so"} <= needed
    assert not [name for name in needed if "cuda" in name or "python" in name]
    assert re.findall(r"\(RUNPATH\).*\[(.+)\]", listing) == ["$ORIGIN"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("/etc/dhp.conf", b"", "/etc/dhp.conf: not a path below site-packages"),
        ("tests/conftest.py", b"", "tests/conftest.py: outside the package"),
        ("dhp_safe_fa/more.so", b"\0/home/somebody/torch/lib\0", "names a folder of the machine that built it"),
        ("dhp_safe_fa/libdhp_fa.so", b".nv.info", "dhp_safe_fa/gates/planted/manifest.json: missing"),
        ("dhp_safe_fa/libdhp_torch.so", b"patched", "libdhp_torch.so: not as dhp_safe_fa/provenance.json says"),
        ("dhp_safe_fa/more.so", b"", "dhp_safe_fa/more.so: dhp_safe_fa/provenance.json does not name it"),
        ("dhp_safe_fa/libdhp_fa.so", b"", "one: the library does not hold this cubin"),
        ("dhp_safe_fa/more.so", b"", "sboms/dhp_safe_fa.cdx.json: does not list every library and cubin"),
    ],
)
def test_a_bad_wheel_is_caught(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    empty = hashlib.sha256(b"").hexdigest()
    provenance = {
        "libraries": {"libdhp_fa.so": empty, "libdhp_torch.so": empty},
        "kernels": {"one": {"sha256": hashlib.sha256(b"cubin").hexdigest(), "offset": 0, "size": 5}},
        "evidence": None,
    }
    files = {"dhp_safe_fa/libdhp_fa.so": b"", "dhp_safe_fa/libdhp_torch.so": b"", name: content}
    files["dhp_safe_fa/provenance.json"] = json.dumps(provenance).encode()
    record = "dhp_safe_fa-1.dist-info/RECORD"
    path = tmp_path / "bad.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in files.items():
            wheel.writestr(member, data)
        wheel.writestr(record, "".join(f"{member},,\n" for member in [*files, record]))
    assert any(sentence in problem for problem in check_wheel.check(path))


# ---- torch, as a requirement of the build -----------------------------------------------------------------------


def test_torch_of_this_environment_is_found() -> None:
    folder = build_backend.find_torch()
    assert folder and (folder / "include" / "torch" / "csrc" / "stable" / "library.h").exists()


@pytest.mark.parametrize(
    ("version", "found"), [("2.10.0", True), ("2.13.0+cpu", True), ("3.0.0", True), ("2.9.1", False), ("", False)]
)
def test_an_old_torch_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, found: bool) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    if version:
        (folder / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\n")
    monkeypatch.setattr(build_backend.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(build_backend.site, "getsitepackages", lambda _: [str(tmp_path)])
    monkeypatch.setattr(build_backend.site, "getusersitepackages", lambda: str(tmp_path / "none"))
    assert build_backend.find_torch() == (folder if found else None)
    monkeypatch.setattr(build_backend.build_meta, "get_requires_for_build_wheel", lambda _: [])
    assert build_backend.get_requires_for_build_wheel() == ([] if found else ["torch>=2.10"])


def test_import_beside_an_old_torch_says_what_to_do() -> None:
    code = "import torch; torch.__version__ = '2.9.1'; import dhp_safe_fa"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError: torch 2.9.1; supported: 2.10 and newer. Run `pip install 'torch>=2.10'`." in result.stderr


def test_torch_to_build_against_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.11.0'\n")
    monkeypatch.setenv("DHP_SAFE_FA_TORCH", str(tmp_path))
    assert build_backend.find_torch() == tmp_path
    monkeypatch.setenv("DHP_SAFE_FA_TORCH", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=r"DHP_SAFE_FA_TORCH=.*none: holds no torch>=2.10"):
        build_backend.find_torch()


def test_a_python_that_is_not_found_is_an_error(tmp_path: Path) -> None:
    before = set(ROOT.glob("dist*"))
    result = subprocess.run(
        [str(ROOT / ".ci" / "package")], capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONS": f"{sys.executable} 3.99 {tmp_path}/python"},
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith(f"no interpreter found for: 3.99 {tmp_path}/python (looked for pythonX.Y in PATH")
    assert set(ROOT.glob("dist*")) == before


# ---- version ----------------------------------------------------------------------------------------------------


def test_version_is_semantic_and_has_release_notes() -> None:
    version = dhp_safe_fa.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", version)
    newest = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d|unreleased)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1] == version
