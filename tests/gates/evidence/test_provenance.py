"""The digests of what takes part in a verdict: what changes which, and that a checkout and a wheel agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dhp_safe_fa import _inspect
from dhp_safe_fa.gates import provenance, registry


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    """A copy of dhp_safe_fa/gates that may be edited."""
    folder = tmp_path / "gates"
    shutil.copytree(Path(provenance.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize(
    ("file", "part"),
    [
        *((f"{gate}/gate.py", f"gate {gate}") for gate in registry.NAMES),
        ("sass/isa/opcodes.py", "gate sass"),
        ("counters/new.py", "gate counters"),
        ("inputs.py", "shared"),
        ("families/forward.py", "shared"),
        ("registry.py", None),
        ("peers/page.py", None),
    ],
)
def test_an_edit_changes_the_part_that_it_belongs_to(file: str, part: str | None, gates: Path) -> None:
    before = provenance.of_gates(gates)
    with (gates / file).open("a") as text:
        text.write("# a comment\n")
    after = provenance.of_gates(gates)
    assert {name for name in before if after[name] != before[name]} == ({part} if part else set())


def test_a_copy_has_the_same_digests(gates: Path) -> None:
    (gates / "sass" / "__pycache__").mkdir()
    (gates / "sass" / "__pycache__" / "gate.pyc").write_bytes(b"1")
    assert provenance.of_gates(gates) == provenance.of_gates()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small checkout."""
    for name in ("plan.c", "dhp_fa.h", "cuda/launch.c", "torch/ops.cpp", "kernels/fwd.cu", "kernels/build_cubins.py",
                 "cpu/tile.c", "python/inspect.cpp"):  # fmt: skip
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "setup.py").write_text("setup")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "is_launch"),
    [
        ("csrc/plan.c", True),
        ("csrc/dhp_fa.h", True),
        ("csrc/cuda/launch.c", True),
        ("csrc/cuda/new.c", True),
        ("csrc/torch/ops.cpp", True),
        ("csrc/kernels/build_cubins.py", True),  # it writes the table of constants that the plan reads
        ("setup.py", True),
        ("csrc/kernels/fwd.cu", False),  # machine code is bound by its own hash
        ("csrc/python/inspect.cpp", True),  # gates ask it which kernel a shape launches
        ("csrc/cpu/tile.c", False),
    ],
)
def test_sources_and_the_launch_path_among_them(file: str, is_launch: bool, root: Path) -> None:
    before = provenance.of_sources(root)
    with (root / file).open("a") as text:
        text.write("/* */")
    after = provenance.of_sources(root)
    assert after["all"] != before["all"]
    assert (after["launch"] != before["launch"]) == is_launch


def test_a_name_counts_as_well_as_the_bytes(root: Path) -> None:
    before = provenance.of_sources(root)
    (root / "csrc" / "plan.c").rename(root / "csrc" / "plan2.c")
    assert provenance.of_sources(root)["launch"] != before["launch"]


def test_the_build_says_what_it_was_made_of() -> None:
    built = _inspect.build_info()["sources"]
    assert set(built) == {"all", "launch"}
    if not (provenance.ROOT / "csrc").is_dir():
        pytest.skip("these are the tests of an installed wheel: its sources are not here")
    assert built == provenance.of_sources(provenance.ROOT), "the sources have changed since the build: make build"


def test_controls_in_a_wheel_have_the_digest_of_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not provenance.CONTROLS.is_dir():
        pytest.skip("the sources of the controls are not here")
    in_checkout = provenance.of_controls()
    monkeypatch.setattr(provenance, "PACKAGED", tmp_path)
    assert provenance.of_controls(tmp_path / "none") is None
    (tmp_path / provenance.MANIFEST).write_text(json.dumps({"sources": in_checkout}))
    assert provenance.of_controls(tmp_path / "none") == in_checkout
    assert all(provenance.here()[part] for part in ("launch", "controls", "policy"))
