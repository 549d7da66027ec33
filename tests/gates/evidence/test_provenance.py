"""The digests of what takes part in a verdict: what changes which, and that a checkout and a wheel agree."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dhp_safe_fa import _inspect
from dhp_safe_fa.gates import provenance, registry, subjects


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
        ("families/dq_out.py", "family dq_out"),
        ("families/decode.py", "family decode"),
        ("families/fold.py", "family fold"),
        ("registry.py", None),
        ("without_comments.py", None),
        ("peers/page.py", None),
    ],
)
def test_an_edit_changes_the_part_that_it_belongs_to(file: str, part: str | None, gates: Path) -> None:
    before = provenance.of_gates(gates)
    with (gates / file).open("a") as text:
        text.write("more = 1\n")
    after = provenance.of_gates(gates)
    assert {name for name in before if after[name] != before[name]} == ({part} if part else set())


def test_what_several_families_are_tested_by_is_a_part_of_each(gates: Path) -> None:
    before = provenance.of_families(gates / "families")
    with (gates / "families" / "packed.py").open("a") as text:
        text.write("more = 1\n")
    after = provenance.of_families(gates / "families")
    changed = {name for name in before if after[name] != before[name]}
    assert {"family tiles", "family forward"} <= changed and not changed & {"family backward", "family delta"}


def test_a_copy_has_the_same_digests(gates: Path) -> None:
    (gates / "sass" / "__pycache__").mkdir()
    (gates / "sass" / "__pycache__" / "gate.pyc").write_bytes(b"1")
    assert provenance.of_gates(gates) == provenance.of_gates()


# A small checkout: two calls, `there` of two families.
SOURCES = {
    "there.c": '#include "families/near/launch.h"\n',
    "back.c": '#include "families/far/launch.h"\n',
    "dhp_fa.h": "",
    "cuda/launch.c": '#include "../dhp_fa.h"\n',
    "torch/ops.cpp": "",
    "python/inspect.cpp": "",
    "cpu/tile.c": "",
    "kernels/build_cubins.py": "",
    "families/near/launch.h": "",
    "families/near/launch.c": '#include "launch.h"\n#include "../beside/launch.h"\n',
    "families/near/near.cu": "",
    "families/near/family.py": "",
    "families/beside/launch.h": '#include "../../dhp_fa.h"\n',
    "families/beside/family.py": "",
    "families/far/launch.h": "",
    "families/far/plan.c": '#include <math.h>\n#include "launch.h"\n',
    "families/far/family.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "setup.py").write_text("setup")
    return tmp_path


EVERY = {"near", "beside", "far"}


@pytest.mark.parametrize(
    ("file", "families"),
    [
        ("csrc/there.c", {"near", "beside"}),
        ("csrc/back.c", {"far"}),
        ("csrc/dhp_fa.h", EVERY),
        ("csrc/cuda/launch.c", EVERY),
        ("csrc/cuda/new.c", EVERY),
        ("csrc/torch/ops.cpp", EVERY),
        ("csrc/python/inspect.cpp", EVERY),  # gates ask it which kernel a shape launches
        ("setup.py", EVERY),
        ("csrc/families/near/launch.c", {"near", "beside"}),
        ("csrc/families/beside/launch.h", {"near", "beside"}),
        ("csrc/families/far/plan.c", {"far"}),
        ("csrc/families/near/near.cu", set()),  # machine code is bound by its own hash
        ("csrc/families/near/family.py", set()),  # and what it says of the kernels by the table's rows
        ("csrc/kernels/build_cubins.py", set()),
        ("csrc/cpu/tile.c", set()),
    ],
)
def test_sources_and_the_launch_paths_among_them(file: str, families: set[str], root: Path) -> None:
    before = provenance.of_sources(root)
    with (root / file).open("a") as text:
        text.write("\nmore\n")
    after = provenance.of_sources(root)
    assert after["all"] != before["all"]
    assert {name for name in EVERY if after["launch"][name] != before["launch"][name]} == families
    assert set(after["launch"]) == EVERY


def test_a_comment_is_another_source_and_the_same_launch(root: Path) -> None:
    before = provenance.of_sources(root)
    (root / "csrc" / "dhp_fa.h").write_text("// a word\n")
    (root / "setup.py").write_text('"""A word."""\n\nsetup  # another')
    after = provenance.of_sources(root)
    assert after["all"] != before["all"] and after["launch"] == before["launch"]


def test_a_name_counts_as_well_as_the_bytes(root: Path) -> None:
    before = provenance.of_sources(root)
    (root / "csrc" / "back.c").rename(root / "csrc" / "backward.c")
    assert provenance.of_sources(root)["launch"]["far"] != before["launch"]["far"]


def test_a_source_of_both_calls_joins_them_only_inside_a_family(root: Path) -> None:
    """What leads to both is a part of both; a family that includes the other's header is one with it."""
    both = '#include "families/near/launch.h"\n#include "families/far/launch.h"\n'
    (root / "csrc" / "there.c").write_text(both)
    apart = provenance.of_sources(root)["launch"]
    assert apart["near"] != apart["far"]
    (root / "csrc" / "families" / "far" / "plan.c").write_text('#include "../near/launch.h"\n')
    joined = provenance.of_sources(root)["launch"]
    assert joined["near"] == joined["far"] == joined["beside"]


@pytest.mark.parametrize(
    ("key", "changes"), [("tile_q", True), ("shared_bytes", True), ("cubin_sha256", False), ("registers", False)]
)
def test_the_rows_of_a_call_in_the_table_take_part(key: str, changes: bool) -> None:
    kernel = {"name": "k", "family": "near", "tile_q": 1, "shared_bytes": 1, "cubin_sha256": "1", "registers": 1}
    built = {"near": "a", "beside": "a", "far": "b"}
    before = provenance.of_launch(built, [kernel])
    after = provenance.of_launch(built, [{**kernel, key: 2}])
    changed = {part for part in before if after[part] != before[part]}
    assert changed == ({"launch near", "launch beside"} if changes else set())


def test_what_leads_to_no_launch_of_a_gate_takes_no_part() -> None:
    """Rules of transforms, autocast, the compiler, and what is said once a call is refused; a new file takes part."""
    package = provenance.ROOT / "dhp_safe_fa"
    left_out = {"autocast.py", "fake.py", "transforms.py", "wrong_types.py"}
    of_operator = {path.name for path in provenance.front_files(package) if path.parent.name == "_operator"}
    assert of_operator == {path.name for path in (package / "_operator").glob("*.py")} - left_out
    assert {"_ops.py", "_windows.py"} < {path.name for path in provenance.front_files(package)}


MET = {  # kernel: family, dtype, head_dim, and those with whose bits its own are compared
    "near64": ("near", "float16", 64, {"near64", "beside64", "only"}),
    "beside64": ("beside", "float16", 64, {"near64", "beside64", "only"}),
    "near128": ("near", "float16", 128, {"near128", "only"}),
    "beside64b": ("beside", "bfloat16", 64, {"beside64b", "only"}),
    "only": ("tiles", "bfloat16", 128, {"near64", "beside64", "near128", "beside64b", "only"}),
    "far64": ("far", "float16", 64, {"far64"}),
    "far128": ("far", "float16", 128, {"far128"}),
}


@pytest.mark.parametrize("changed", MET)
def test_kernels_whose_bits_are_compared(changed: str) -> None:
    kernels = [
        {"name": name, "family": family, "dtype": dtype, "head_dim": head_dim, "cubin_sha256": "1"}
        for name, (family, dtype, head_dim, _) in MET.items()
    ]
    built = {"near": "a", "beside": "a", "tiles": "a", "far": "b"}
    before = provenance.of_kernels(built, kernels)
    after = provenance.of_kernels(
        built, [kernel | ({"cubin_sha256": "2"} if kernel["name"] == changed else {}) for kernel in kernels]
    )
    assert {part for part in before if after[part] != before[part]} == {f"kernels {name}" for name in MET[changed][3]}


def test_a_call_under_test_launches_kernels_of_one_dtype_and_head_dim() -> None:
    by_name = {kernel["name"]: kernel for kernel in _inspect.kernels()}
    seen = 0
    for name, kernel in by_name.items():
        call = subjects.by_name(name).call()
        for shape in call.shapes if call.launches else ():
            launched = [by_name[other] for other, _ in call.launches(shape)]
            seen += len(launched)
            of = {(one["dtype"], one["head_dim"]) for one in launched if one["family"] != provenance._WITH_ALL}
            assert kernel["family"] == provenance._WITH_ALL or of <= {(kernel["dtype"], kernel["head_dim"])}, name
    assert seen > len(by_name)


def test_a_launch_leaves_out_nothing_that_is_linked() -> None:
    """By the symbols of the objects that the build made: what a family's host code calls takes part in its launches."""
    objects = [path for path in (provenance.ROOT / "build").glob("temp*/csrc/**/*.o")]
    if not objects or shutil.which("nm") is None:
        pytest.skip("these are the tests of an installed wheel, or there is no nm")
    csrc = provenance.ROOT / "csrc"
    defined: dict[str, Path] = {}
    used: dict[Path, set[str]] = {}
    for path in objects:
        below = path.with_suffix("").relative_to(next((provenance.ROOT / "build").glob("temp*")) / "csrc")
        source = next((one for one in (csrc / f"{below}.c", csrc / f"{below}.cpp") if one.is_file()), None)
        for line in subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout.splitlines():
            *_, kind, symbol = line.split()
            if source and kind == "U":
                used.setdefault(source, set()).add(symbol)
            elif source and kind in "TDBRV":
                defined[symbol] = source
    host = [path for path in {*used, *defined.values()} if "cpu" not in path.relative_to(csrc).parts]
    for family, sources in provenance.launch_sources(host, csrc).items():
        own = [path for path in sources if provenance._families_of(path, csrc)]
        assert any(path.parent.name == family for path in own), "nothing was looked at"
        needed = {defined[symbol] for path in own for symbol in used.get(path, ()) if symbol in defined}
        left_out = {path for path in needed - set(sources) if "cpu" not in path.relative_to(csrc).parts}
        assert not left_out, f"{family}: {sorted(left_out)}"


def test_the_build_says_what_it_was_made_of() -> None:
    built = _inspect.build_info()["sources"]
    assert set(built) == {"all", "launch"}
    assert {kernel["family"] for kernel in _inspect.kernels()} <= set(built["launch"])
    if not (provenance.ROOT / "csrc").is_dir():
        pytest.skip("these are the tests of an installed wheel: its sources are not here")
    assert built == provenance.of_sources(provenance.ROOT), "the sources have changed since the build: make build"


def test_controls_in_a_wheel_have_the_digest_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not provenance.CONTROLS.is_dir():
        pytest.skip("the sources of the controls are not here")
    in_checkout = provenance.of_controls()
    monkeypatch.setattr(provenance, "PACKAGED", tmp_path)
    assert provenance.of_controls(tmp_path / "none") is None
    (tmp_path / provenance.MANIFEST).write_text(json.dumps({"sources": in_checkout}))
    assert provenance.of_controls(tmp_path / "none") == in_checkout
    assert all(provenance.here()[part] for part in ("launch forward", "launch backward", "controls", "policy"))
