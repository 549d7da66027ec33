"""The stored runs: whether the kernels that they measured are those of today, and that README says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dhp_safe_fa import _inspect
from dhp_safe_fa.bench import stored
from dhp_safe_fa.bench.directions import DIRECTIONS

README = stored.RESULTS.parents[1] / "README.md"


def kernel(name: str, family: str, part: str, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"name": name, "family": family, "part": part, "dtype": dtype, "cubin_sha256": f"sha of {name}"}


KERNELS = [
    kernel("fwd", "forward", "out"),
    kernel("fwd16", "forward", "out", "float16"),
    kernel("listed", "forward", "packed out"),
    kernel("tiles", "tiles", "tiles"),
    kernel("dec", "decode", "out"),
    kernel("bwd", "backward", "dq dk dv"),
    kernel("delta", "delta", "delta"),
]
SHA256 = {each["name"]: each["cubin_sha256"] for each in KERNELS}


def a_run(folder: Path, cases: list[dict[str, str]] | None, kernels: dict[str, str], **environment: Any) -> Path:
    path = folder / "run.json"
    about = {"device": "GPU", "commit": "0123456789", "cuda": "13.0", "kernels": kernels, **environment}
    about = {name: value for name, value in about.items() if value != "absent"}
    results = {} if cases is None else {"results": [{"case": case} for case in cases]}
    path.write_text(json.dumps({"environment": about, **results}))
    return path


@pytest.mark.parametrize(
    ("direction", "dtype", "names"),
    [
        (None, "bfloat16", ["fwd"]),
        ("forward", "float16", ["fwd16"]),
        ("decode", "bfloat16", ["fwd", "dec"]),
        ("varlen", "bfloat16", ["listed", "tiles"]),
        ("paged", "bfloat16", ["listed", "tiles"]),
        ("backward", "bfloat16", ["bwd", "delta"]),
        ("training", "bfloat16", ["fwd", "bwd", "delta"]),
    ],
)
def test_which_kernels_count(direction: str | None, dtype: str, names: list[str], tmp_path: Path) -> None:
    case = {"dtype": dtype} | ({"direction": direction} if direction else {})
    fresh = stored.stored_run(a_run(tmp_path, [case], SHA256), tmp_path, KERNELS)
    assert (fresh.same, fresh.of, fresh.is_stale) == (len(names), len(names), False)
    assert fresh.row() == f"| `run.json` | GPU | `0123456` | {len(names)} of {len(names)} |"
    for name in SHA256:
        changed = stored.stored_run(a_run(tmp_path, [case], {**SHA256, name: "another"}), tmp_path, KERNELS)
        gone = {other: sha256 for other, sha256 in SHA256.items() if other != name}
        without = stored.stored_run(a_run(tmp_path, [case], gone), tmp_path, KERNELS)
        for run in (changed, without):
            assert run.is_stale == (name in names) and run.same == len(names) - (name in names)
            assert ("**stale**" in run.row()) == (name in names)


def test_every_direction_is_known() -> None:
    assert set(stored.SERVED_BY) == set(DIRECTIONS)
    families = {f"{each['family']} {each['part']}" for each in _inspect.kernels()}
    beginnings = {beginning for served in stored.SERVED_BY.values() for beginning in served}
    assert all(any(family.startswith(each) for each in beginnings) for family in families), "a kernel that no run is of"


def test_several_kinds_in_a_run_and_several_gpus(tmp_path: Path) -> None:
    both = stored.stored_run(a_run(tmp_path, [{"dtype": "float16"}, {"dtype": "bfloat16"}], SHA256), tmp_path, KERNELS)
    assert both.of == 2
    over_ranks = stored.stored_run(a_run(tmp_path, None, SHA256), tmp_path, KERNELS)
    assert over_ranks.of == 3 and not over_ranks.is_stale


def test_a_cpu_has_no_kernels(tmp_path: Path) -> None:
    run = stored.stored_run(a_run(tmp_path, [{"dtype": "bfloat16"}], SHA256, cuda="absent"), tmp_path, KERNELS)
    assert run.row() == "| `run.json` | GPU | `0123456` | – |"
    unknown = a_run(tmp_path, [{"dtype": "bfloat16"}], SHA256, cuda="absent", commit=None)
    assert "| not known | – |" in stored.stored_run(unknown, tmp_path, KERNELS).row()


def test_what_is_no_stored_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="is no stored run"):
        stored.stored_runs(tmp_path, KERNELS)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path, [{"dtype": "bfloat16"}], {})
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    monkeypatch.setattr(_inspect, "kernels", lambda: KERNELS)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{stored.BEGIN}\nold\n{stored.END}\nbehind\n")
    assert stored.main(["--write", str(readme)]) == 0
    said = capsys.readouterr().out
    assert "| `run.json` | GPU | `0123456` | 0 of 1: **stale** |\n" in said
    assert readme.read_text() == f"before\n{stored.BEGIN}\n{said}{stored.END}\nbehind\n"
    readme.write_text("nothing\n")
    assert stored.main(["--write", str(readme)]) == 2 and "there are no lines" in capsys.readouterr().err
    assert readme.read_text() == "nothing\n"
    monkeypatch.setattr(stored, "RESULTS", tmp_path / "none")
    assert stored.main([]) == 2 and "there are no stored runs" in capsys.readouterr().err
    monkeypatch.setattr(_inspect, "kernels", list)
    assert stored.main([]) == 2 and "no GPU kernels" in capsys.readouterr().err


def test_readme_says_what_is_stale() -> None:
    compiled_by = {
        json.loads(path.read_text())["environment"].get("nvcc") for path in stored.RESULTS.glob("h[12]00_*.json")
    }
    if _inspect.build_info()["cuda"] not in compiled_by:
        pytest.skip("this build's nvcc makes other machine code than that of the stored runs")
    text = README.read_text(encoding="utf-8")
    runs = stored.stored_runs(stored.RESULTS, _inspect.kernels())
    assert text == stored.rewrite(text, runs), "python -m dhp_safe_fa.bench.stored --write README.md"
    for name in ("h100_forward.json", "h100_backward.json"):
        assert name in text
