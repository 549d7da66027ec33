"""Builds called through the C ABI: structs as the C compiler lays them out, several builds at once, and kept ones."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dhp_safe_fa import _inspect
from dhp_safe_fa.bench import Candidate, Case, Settings
from dhp_safe_fa.bench.gradients import peers
from dhp_safe_fa.bench.gradients.cases import BackwardCase
from dhp_safe_fa.burn.builds import abi, keeping
from dhp_safe_fa.burn.builds.library import HEADER, LIBRARY, Library
from dhp_safe_fa.burn.measuring import blocks

BUILT = keeping.ROOT / "dhp_safe_fa" / LIBRARY
H = keeping.ROOT / "csrc" / HEADER


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(keeping, "KEPT", tmp_path / "kept")
    return keeping.keep(BUILT, H)


def test_layout_is_the_c_compilers(tmp_path: Path) -> None:
    """Sizes and offsets of every struct of the header, printed by a C program."""
    header = abi.parse(H.read_text())
    expected, lines = [], []
    for name, struct in header.structs.items():
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:  # type: ignore[misc]
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    for name, value in header.enumerators.items():
        expected.append(f"{name} {value}")
        lines.append(f'printf("{name} %d\\n", (int){name});')
    program = tmp_path / "layout.c"
    program.write_text(f'#include <stdio.h>\n#include "{H}"\nint main(void) {{\n{chr(10).join(lines)}\nreturn 0; }}\n')
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, str(program), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == expected
    assert {"dhp_attention", "dhp_tensor", "dhp_plan", "dhp_kernel_info", "dhp_error"} <= header.structs.keys()


def test_a_header_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="struct s: cannot read the field 'long double x'"):
        abi.parse("typedef struct s { long double x; } s;")


def test_runs_beside_the_operator(library: Library, rng: torch.Generator) -> None:
    copy = blocks.copy_of(library)
    q = torch.randn(2, 6, 70, 32, generator=rng)
    for causal, key_heads, seqlen in ((False, 6, 70), (True, 6, 70), (True, 2, 70), (False, 2, 90)):
        k, v = (torch.randn(2, key_heads, seqlen, 32, generator=rng) for _ in range(2))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        ours = library.attend(q, k, v, causal)
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
        assert torch.equal(ours, copy.attend(q, k, v, causal))
    assert copy._core._handle != library._core._handle


def test_gradients_beside_the_operator(library: Library) -> None:
    for sizes in ((2, 6, 70, 32, True, "float32"), (2, 6, 70, 32, False, "bfloat16", 2, 90)):
        case = BackwardCase(*sizes)
        inputs = case.draw("cpu", torch.Generator().manual_seed(1), "BSHD")
        found = library.differentiate(*inputs, case.causal)
        assert all(map(torch.equal, found, peers.our_gradients(*inputs, case.causal)))
        assert case.judge(inputs, torch.Generator()).ours(found).wrong is None
    q, lse = torch.randn(1, 1, 8, 300), torch.zeros(1, 1, 8)
    with pytest.raises(RuntimeError, match="head_dim 300"):
        library.differentiate(q, q, q, q, lse, q, False)


@pytest.mark.skipif(not _inspect.kernels(), reason="this build has no GPU kernels: nvcc was not found")
def test_launches_of_gradients_are_told_apart(library: Library) -> None:
    case = BackwardCase(1, 8, 512, 256, True, "bfloat16")
    plan = _inspect.plan_backward(case.shape, case.key_shape, case.dtype, True)
    hashes = library.cubins()
    expected = ", ".join(f"{hashes[one['kernel']][:16]} grid {one['grid']}" for one in plan)
    assert library.launch_backward(case) == expected and expected.count("grid") == 4
    assert library.launch_backward(case) != library.launch_backward(BackwardCase(1, 8, 1024, 256, True, "bfloat16"))
    with pytest.raises(ValueError, match="head_dim 12"):
        library.launch_backward(BackwardCase(1, 1, 8, 12, False, "float16"))


def test_a_build_from_before_the_backward_has_none(library: Library, tmp_path: Path) -> None:
    header = (library.path.parent / HEADER).read_text()
    shutil.copy(library.path, tmp_path)
    (tmp_path / HEADER).write_text(header.replace("dhp_backward_workspace", "dhp_other"))
    before = Library(tmp_path)
    with pytest.raises(ValueError, match="dhp_backward_workspace is declared differently"):
        before.launch_backward(BackwardCase(1, 8, 512, 64, True, "bfloat16"))


def test_refuses_like_the_library(library: Library) -> None:
    with pytest.raises(RuntimeError, match="head_dim 300"):
        library.attend(*(torch.randn(1, 1, 8, 300) for _ in range(3)), False)
    with pytest.raises(ValueError, match="head_dim 12" if _inspect.kernels() else "this build has no GPU kernels"):
        library.launch(Case(1, 1, 8, 12, False, "float16"))


def test_kernels_are_the_shipped_ones(library: Library) -> None:
    shipped = {str(kernel["name"]): str(kernel["cubin_sha256"]) for kernel in _inspect.kernels()}
    assert library.cubins() == shipped
    for kernel in library.kernels:
        stored = library.path.parent / f"{kernel.name}.cubin"
        assert hashlib.sha256(stored.read_bytes()).hexdigest() == kernel.sha256


@pytest.mark.skipif(not _inspect.kernels(), reason="this build has no GPU kernels: nvcc was not found")
def test_launches_are_told_apart(library: Library) -> None:
    case = Case(1, 8, 512, 64, False, "float16")
    assert library.launch(case) == library.launch(Case(1, 8, 512, 64, False, "float16"))
    assert library.launch(case) != library.launch(Case(1, 8, 1024, 64, False, "float16"))
    plan = _inspect.plan(case.shape, case.shape, "float16")
    assert plan is not None and f"grid {plan['grid']}," in library.launch(case)
    grouped = Case(32, 32, 1, 128, False, "float16", key_heads=8, key_seqlen=8192)
    plan = _inspect.plan(grouped.shape, grouped.key_shape, "float16")
    assert plan is not None and f"heads_per_tile {plan['heads_per_tile']}," in library.launch(grouped)
    assert library.launch(grouped) != library.launch(Case(32, 32, 1, 128, False, "float16", key_seqlen=8192))


def test_another_signature_is_not_called(tmp_path: Path) -> None:
    shutil.copy(BUILT, tmp_path)
    (tmp_path / HEADER).write_text(H.read_text().replace("int device, void *stream", "void *stream, int device"))
    with pytest.raises(ValueError, match="dhp_attention_cuda is declared differently"):
        Library(tmp_path)


def test_a_kept_build_is_found_again(library: Library) -> None:
    assert library.path.parent.name == library.sha256
    again = keeping.kept("x", library.sha256, "no commit", library.cubins())
    assert again.path == library.path


def test_a_kept_build_with_other_cubins_is_refused(library: Library) -> None:
    with pytest.raises(keeping.BuildFailed, match="the cubins are not those of its record"):
        keeping.kept("x", library.sha256, "0" * 40, {"fwd": "00" * 32})
    assert not library.path.exists()


def test_a_missing_build_without_history(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ROOT", tmp_path)
    with pytest.raises(keeping.BuildFailed, match=r"'x': its build is not in .* without git history"):
        keeping.kept("x", "0" * 64, "0" * 40, {})


def test_the_commit_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ROOT", tmp_path)
    monkeypatch.setenv("DHP_SAFE_FA_COMMIT", "ab" * 20)
    assert keeping.commit() == "ab" * 20
    monkeypatch.setenv("DHP_SAFE_FA_COMMIT", "yesterday")
    with pytest.raises(keeping.BuildFailed, match="DHP_SAFE_FA_COMMIT is 'yesterday'"):
        keeping.commit()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one commit, whose setup.py builds by copying the library of this build."""
    folder = tmp_path / "repository"
    for name, text in (
        ("csrc/kernel.cu", "1\n"),
        (f"csrc/{HEADER}", H.read_text()),
        ("setup.py", f"import shutil\nshutil.copy({str(BUILT)!r}, 'dhp_safe_fa')\n"),
        ("dhp_safe_fa/__init__.py", ""),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "1"]):
        subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True)
    monkeypatch.setattr(keeping, "ROOT", folder)
    return folder


def test_a_missing_build_is_made_again_from_its_commit(library: Library, repository: Path) -> None:
    commit = keeping.commit()
    (repository / "setup.py").write_text("raise SystemExit('the sources of today do not build')\n")
    again = keeping.kept("x", "ab" * 32, commit, library.cubins())
    assert again.path.parent.name == "ab" * 32
    assert again.cubins() == library.cubins()
    with pytest.raises(keeping.BuildFailed, match=r"(?s)the current sources cannot be built:.*do not build"):
        keeping.build_current()
    with pytest.raises(keeping.BuildFailed, match="git archive failed"):
        keeping.kept("x", "cd" * 32, "0" * 40, library.cubins())


def test_uncommitted_sources_are_refused(repository: Path) -> None:
    assert len(keeping.commit()) == 40
    (repository / "README.md").write_text("other files may change\n")
    assert len(keeping.commit()) == 40
    (repository / "csrc" / "kernel.cu").write_text("2\n")
    with pytest.raises(keeping.BuildFailed, match=r"uncommitted changes \(csrc/kernel.cu\)"):
        keeping.commit()


def test_times_of_two_builds_on_the_cpu(library: Library) -> None:
    """The measuring itself, with real times: our build and the peers in every fourth block, else the keeping."""
    copy = blocks.copy_of(library)
    both = [Candidate("ours", library.attend), Candidate("again", copy.attend)]
    peer = [Candidate("math", lambda q, k, v, c: F.scaled_dot_product_attention(q, k, v, is_causal=c))]
    seen: list[str] = []

    def lineup(case: Case, block: int) -> list[Candidate]:
        order = blocks.interleaved(both, peer, block)
        seen.append(" ".join(candidate.name for candidate in order))
        return order

    case = Case(1, 2, 40, 16, True, "float32")
    (shape,) = blocks.measure_all([case], lineup, Settings(2, 0.1), 5, "cpu", {}, lambda: None)
    assert seen == ["ours math", "again ours", "ours again", "again ours", "ours math"]
    assert shape.case == case.label
    assert list(shape.us) == ["ours", "again", "math"]
    assert all(us is not None and us > 0 for us in shape.us["ours"])
    assert [us is not None for us in shape.us["again"]] == [False, True, True, True, False]
    assert [us is not None for us in shape.us["math"]] == [True, False, False, False, True]
