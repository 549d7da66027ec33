"""Evidence piece by piece: what is missing, how it is dealt, what becomes of pieces that end, or do not."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import HELD, KERNELS, LISTINGS, NOW, gate_result, some_content, some_run

from dhp_safe_fa import _inspect, evidence
from dhp_safe_fa.gates import cli, provenance, registry
from dhp_safe_fa.gates.evidence import commands, gathering, writer
from dhp_safe_fa.gates.evidence.pieces import Piece, deal, is_missing
from dhp_safe_fa.gates.verdict import FAIL, INVALID, NOT_RUN, PASS

FOREVER = float("inf")


def loaded(content: dict[str, Any], folder: Path) -> evidence.Evidence:
    path = folder / "evidence.json"
    writer.write(content, path)
    return evidence.load(path)


# ---- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "missing"), [(PASS, False), (FAIL, False), (INVALID, True), (NOT_RUN, True)])
def test_what_has_no_verdict_is_missing(verdict: str, missing: bool, tmp_path: Path) -> None:
    run = some_run()
    run["timing"][0] = gate_result("timing", "abc", verdict)
    known = loaded(writer.assemble([run], KERNELS, LISTINGS, NOW), tmp_path)
    found = {
        (str(kernel["name"]), gate)
        for kernel in KERNELS
        for gate in registry.NAMES
        if is_missing(known, kernel, gate, False, NOW)
    }
    assert found == ({("abc", "timing")} if missing else set())


def test_what_is_stale_or_unknown_is_missing(tmp_path: Path) -> None:
    known = loaded(some_content(), tmp_path)
    kernel = KERNELS[0]
    assert is_missing(None, kernel, "sass", False, NOW)
    assert is_missing(known, {**kernel, "cubin_sha256": "e" * 64}, "sass", False, NOW)
    assert is_missing(known, {**kernel, "name": "ghi"}, "sass", False, NOW)
    changed = {**NOW, "gate timing": "another"}
    assert [gate for gate in registry.NAMES if is_missing(known, kernel, gate, False, changed)] == ["timing"]


def test_a_quick_pass_is_missing_in_full(tmp_path: Path) -> None:
    run = some_run()
    run["how"]["quick"] = ["timing"]
    run["timing"][1] = gate_result("timing", "def", FAIL)
    known = loaded(writer.assemble([run], KERNELS, LISTINGS, NOW), tmp_path)
    assert [is_missing(known, kernel, "timing", False, NOW) for kernel in KERNELS] == [True, False]
    assert not is_missing(known, KERNELS[0], "timing", True, NOW)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 117])
def test_every_kernel_is_in_one_piece(count: int) -> None:
    names = [f"k{number}" for number in range(count)]
    dealt = deal(dict.fromkeys(("counters", "timing"), names), ["timing"])
    for gate in ("counters", "timing"):
        mine = [piece for piece in dealt if piece.gate == gate]
        assert [name for piece in mine for name in piece.kernels] == names, "neighbours stay together"
        sizes = [len(piece.kernels) for piece in mine]
        assert all(0 < size <= registry.gate(gate).piece for size in sizes) and max(sizes, default=0) <= 1 + min(
            sizes, default=0
        )
        assert {piece.quick for piece in mine} <= {gate == "timing"}


# ---- making them -----------------------------------------------------------------------------------------------------

PIECES = [Piece("timing", (f"k{number}",), False) for number in range(6)]


def gathered(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: tuple[str, ...], seconds: float = FOREVER
) -> tuple[list[Piece], list[dict[str, Any]], list[str]]:
    """Pieces without a result, what was stored, what was told."""
    monkeypatch.setattr(gathering, "_make", make)
    stored: list[dict[str, Any]] = []
    told: list[str] = []
    left = gathering.gather(PIECES, devices, seconds, tmp_path / "pieces", stored.append, told.append)
    return left, stored, told


def test_devices_share_the_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each makes one at a time, and both are at it at once."""
    together = threading.Barrier(2, timeout=20)
    busy: Counter[str] = Counter()

    def make(piece: Piece, device: str, *_: Any) -> tuple[dict[str, Any], str]:
        busy[device] += 1
        assert busy[device] == 1
        together.wait()
        busy[device] -= 1
        return {"piece": piece, "device": device}, ""

    left, stored, told = gathered(make, monkeypatch, tmp_path, ("0", "3"))
    assert not left and Counter(run["device"] for run in stored) == {"0": 3, "3": 3}
    assert sorted(run["piece"].kernels for run in stored) == sorted(piece.kernels for piece in PIECES)
    assert len(told) == 6 and told[0].startswith("timing on 1 kernel, device ")


def test_none_is_begun_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what the slowest took until then."""

    def make(*_: Any) -> tuple[dict[str, Any], str]:
        time.sleep(0.5)
        return {}, ""

    left, stored, _ = gathered(make, monkeypatch, tmp_path, ("",), seconds=1.2)
    assert (len(stored), left) == (2, PIECES[2:])


def test_a_piece_that_ends_badly_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(piece: Piece, *_: Any) -> tuple[dict[str, Any] | None, str]:
        return (None, "ended with 1: out of memory") if piece.kernels == ("k1",) else ({}, "")

    left, stored, told = gathered(make, monkeypatch, tmp_path, ("",))
    assert left == [PIECES[1]] and len(stored) == 5
    assert told[1] == "timing on 1 kernel: ended with 1: out of memory"


def test_what_cannot_be_stored_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def store(run: dict[str, Any]) -> None:
        raise writer.Refused("another commit")

    monkeypatch.setattr(gathering, "_make", lambda *_: ({}, ""))
    with pytest.raises(writer.Refused, match="another commit"):
        gathering.gather(PIECES, ("0", "1"), FOREVER, tmp_path / "pieces", store, lambda _: None)


def program(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for python: body has request (what is asked for) and result (a path)."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        "assert sys.argv[1:3] == ['-m', 'dhp_safe_fa.gates.evidence.piece']\n"
        f"request, result = json.load(open(sys.argv[3])), sys.argv[4]\n{body}"
    )
    path.chmod(0o755)
    monkeypatch.setattr(gathering.sys, "executable", str(path))


def made(folder: Path, device: str = "", seconds: float = FOREVER) -> tuple[dict[str, Any] | None, str]:
    return gathering._make(PIECES[0], device, folder / "0", time.monotonic() + seconds, threading.Event())


def test_a_piece_is_a_process_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "json.dump([request, os.environ.get('CUDA_VISIBLE_DEVICES')], open(result, 'w'))\n"
    program(tmp_path, body, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    asked = {"gate": "timing", "kernels": ["k0"], "quick": False}
    assert made(tmp_path, "3") == ([asked, "3"], "")
    assert made(tmp_path) == ([asked, "7"], "")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("print('working')\nsys.exit('no CUDA GPU')\n", "ended with 1: no CUDA GPU ("),
        ("pass\n", "ended with 0: no word ("),
        ("time.sleep(60)\n", "stopped, time was up"),
    ],
)
def test_a_piece_without_a_result_says_why(
    body: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, body, monkeypatch)
    run, said = made(tmp_path, seconds=1 if "sleep" in body else FOREVER)
    assert run is None and said.startswith(fault)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build that is clean and holds the made-up kernels."""
    monkeypatch.setattr(writer, "require_clean_build", lambda *_: None)
    monkeypatch.setattr(provenance, "here", lambda: NOW)
    monkeypatch.setattr(_inspect, "kernels", lambda: KERNELS)
    monkeypatch.setattr(_inspect, "cubin", lambda name: name.encode())
    monkeypatch.setattr(writer, "listing_digest", lambda cubin: LISTINGS[cubin.decode()])
    monkeypatch.setattr(commands, "LAST_RUN", tmp_path / "build" / "run.json")


def test_the_command_makes_what_is_missing(
    build: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evidence.json"
    run = some_run()
    run["timing"][1] = gate_result("timing", "def", INVALID)
    del run["bitwise"]
    writer.write(writer.assemble([run], KERNELS, LISTINGS, NOW), out)
    asked: list[Piece] = []

    def make(piece: Piece, *_: Any) -> tuple[dict[str, Any] | None, str]:
        asked.append(piece)
        if piece.gate == "timing" and len(asked) < 3:
            return None, "stopped, time was up"
        found = some_run()
        return {
            "environment": found["environment"],
            "how": {**found["how"], "kernels": list(piece.kernels), "gates": [piece.gate]},
            piece.gate: [gate_result(piece.gate, name) for name in piece.kernels],
        }, ""

    monkeypatch.setattr(gathering, "_make", make)
    command = ["evidence", "--missing", "--devices", "0", "--minutes", "9", "--output", str(out)]
    assert cli.main(command) == 2
    said = capsys.readouterr().out
    assert "not run: timing on 1 kernel; --missing goes on with it" in said
    assert asked == [Piece("bitwise", ("abc", "def"), False), Piece("timing", ("def",), False)]
    assert cli.main(command) == 0
    assert asked[2:] == [Piece("timing", ("def",), False)]
    assert evidence.compare(evidence.load(out), HELD, NOW).state == "fresh"
    assert cli.main(command) == 0
    assert "nothing is missing" in capsys.readouterr().out and len(asked) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--missing", "--from", "run.json"], "not with --from"),
        (["--minutes", "5", "--from", "run.json"], "not with --from"),
        (["--missing", "--kernel", "nosuch"], "nosuch"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], said: str, build: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evidence", *options, "--output", str(tmp_path / "evidence.json")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "evidence.json").exists()


@pytest.mark.parametrize("minutes", ["0", "-1", "soon", "nan", "inf"])
def test_minutes_are_a_number_above_0(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evidence", "--minutes", minutes])
    assert f"'{minutes}' is no number of minutes above 0" in capsys.readouterr().err


def test_pieces_of_this_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code is looked at in a process of its own; what needs a GPU says that there is none."""
    kernels = _inspect.kernels()
    if not kernels:
        pytest.skip("no GPU kernel was built")
    name = str(kernels[0]["name"])
    sass, timing = Piece("sass", (name,), False), Piece("timing", (name,), False)
    stored: list[dict[str, Any]] = []
    told: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    left = gathering.gather([sass, timing], ("",), FOREVER, tmp_path / "pieces", stored.append, told.append)
    assert left == [timing] and "ended with 1: no CUDA GPU" in told[1]
    assert [report["verdict"] for report in stored[0]["sass"]] == [PASS]
    assert stored[0]["how"]["kernels"] == [name] and stored[0]["how"]["gates"] == ["sass"]
    assert json.loads((tmp_path / "pieces" / "0.json").read_text()) == stored[0]
