"""Evidence piece by piece: what is missing, how it is dealt, what becomes of pieces that end, or do not."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evidence_samples import HELD, KERNELS, LISTINGS, NOW, gate_result, some_content, some_run

from dhp_safe_fa import _inspect, evidence
from dhp_safe_fa.gates import cli, provenance, registry
from dhp_safe_fa.gates.evidence import commands, gathering, piece, pieces, writer
from dhp_safe_fa.gates.evidence.pieces import Piece, deal
from dhp_safe_fa.gates.tools import NotRun
from dhp_safe_fa.gates.verdict import FAIL, INVALID, NOT_RUN, PASS

FOREVER = float("inf")


def loaded(content: dict[str, Any], folder: Path) -> evidence.Evidence:
    path = folder / "evidence.json"
    writer.write(content, path)
    return evidence.load(path)


def is_missing(
    known: evidence.Evidence | None, kernel: dict[str, Any], gate: str, quick: bool, now: dict[str, str | None]
) -> bool:
    return pieces.is_missing(known, writer.findings(known), kernel, gate, quick, now)


def is_found(known: evidence.Evidence, kernel: dict[str, Any], gate: str, now: dict[str, str | None]) -> bool:
    return writer.has_failed(writer.findings(known), kernel, gate, now)


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


def test_what_was_found_is_not_looked_at_again(tmp_path: Path) -> None:
    """A gate is changed, passes, and is changed back: what is stored is of neither time, and the finding stands."""
    failed, passed = some_run(), some_run()
    failed["timing"][0] = gate_result("timing", "abc", FAIL)
    before = loaded(writer.assemble([failed], KERNELS, LISTINGS, NOW), tmp_path)
    now = {**NOW, "gate timing": "another"}
    assert is_found(before, KERNELS[0], "timing", NOW) and not is_found(before, KERNELS[0], "timing", now)
    passed["how"]["digests"] = now
    after = loaded(writer.assemble([passed], KERNELS, LISTINGS, now, before), tmp_path)
    assert not is_missing(after, KERNELS[0], "timing", False, now) and not is_found(after, KERNELS[0], "timing", now)
    assert is_found(after, KERNELS[0], "timing", NOW) and not is_missing(after, KERNELS[0], "timing", False, NOW)
    assert is_missing(after, KERNELS[1], "timing", False, NOW)


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
Made = tuple[dict[str, Any] | None, str]


def gathered(
    make: Callable[..., Made],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    devices: tuple[str, ...] = ("",),
    seconds: float = FOREVER,
    pieces: Sequence[Piece] = PIECES,
    store: Callable[[dict[str, Any]], str] = lambda run: "PASS",
    fault_of: Callable[[str], str] = lambda device: "",
) -> tuple[list[Piece], list[dict[str, Any]], list[str]]:
    """Pieces without a result, what was stored, what was told."""
    monkeypatch.setattr(gathering, "_make", make)
    monkeypatch.setattr(gathering, "_fault_of", fault_of)
    stored: list[dict[str, Any]] = []
    told: list[str] = []

    def keep(run: dict[str, Any]) -> str:
        said = store(run)
        stored.append(run)
        return said

    return gathering.gather(pieces, devices, seconds, folder, keep, told.append), stored, told


def test_devices_share_the_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each makes one at a time, and both are at it at once; what they store they store one after the other."""
    together = threading.Barrier(2, timeout=20)
    busy: Counter[str] = Counter()
    storing = threading.Lock()

    def make(piece: Piece, device: str, *_: Any) -> Made:
        busy[device] += 1
        assert busy[device] == 1
        together.wait()
        busy[device] -= 1
        return {"piece": piece, "device": device}, ""

    def store(run: dict[str, Any]) -> str:
        assert storing.acquire(blocking=False), "another is at it"
        time.sleep(0.05)
        storing.release()
        return "PASS"

    left, stored, told = gathered(make, monkeypatch, tmp_path, ("0", "3"), store=store)
    assert not left and Counter(run["device"] for run in stored) == {"0": 3, "3": 3}
    assert sorted(run["piece"].kernels for run in stored) == sorted(piece.kernels for piece in PIECES)
    assert len(told) == 6 and re.fullmatch(r"timing on 1 kernel, device [03]: PASS, \d s", told[0])


def test_none_is_begun_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the most that a kernel of its gate took until then: the second piece has four times as many."""
    clock = 0.0
    monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic=lambda: clock))
    some = [Piece("timing", tuple("abcd"[:count]), False) for count in (1, 4, 2, 1)]
    some.append(Piece("bitwise", tuple("abcd"), False))

    def make(piece: Piece, *_: Any) -> Made:
        nonlocal clock
        clock += 10 * len(piece.kernels)
        return {"piece": piece}, ""

    left, stored, _ = gathered(make, monkeypatch, tmp_path, seconds=39, pieces=some)
    assert [run["piece"] for run in stored] == [some[0], some[2], some[4]] and left == [some[1], some[3]]


@pytest.mark.parametrize(("left", "begun"), [(200, 2), (170, 1)])
def test_what_keeps_what_it_has_is_begun_with_some_minutes_left(
    left: float, begun: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = 0.0
    monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic=lambda: clock))
    some = [Piece(gate, ("a",), False) for gate in ("timing", "timing", "counters", "counters")]

    def make(piece: Piece, *_: Any) -> Made:
        nonlocal clock
        clock += 400
        return {"piece": piece}, ""

    _, stored, _ = gathered(make, monkeypatch, tmp_path, seconds=400 + left, pieces=some[:2])
    assert len(stored) == begun
    clock = 0.0
    _, stored, _ = gathered(make, monkeypatch, tmp_path, seconds=400 + left, pieces=some[2:])
    assert len(stored) == 1, "this one would be lost"


@pytest.mark.parametrize(("gate", "is_told"), [("timing", True), ("counters", False)])
def test_a_piece_is_told_once_that_time_is_up(
    gate: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []

    def run_all(arguments: Any, screen: cli.Screen, gates: Sequence[str]) -> tuple[str, dict[str, Any]]:
        with screen.progress() as progress:
            task = progress.add_task(gate, total=None)
            for _ in range(3):
                try:
                    progress.update(task, description=gate, completed=1, total=2)
                except TimeoutError as error:
                    told.append(str(error))
        return PASS, {"gates": list(gates)}

    monkeypatch.setattr(cli, "run_all", run_all)
    monkeypatch.setattr(piece, "require_gpu", lambda: None)
    request, result = tmp_path / "0.request", tmp_path / "0.json"
    request.write_text(json.dumps({"piece": asdict(Piece(gate, ("a",), False)), "seconds": -1.0}))
    piece.main(request, result)
    assert told == ["time was up"] * is_told and json.loads(result.read_text()) == {"gates": [gate]}


def test_a_piece_that_ends_badly_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(piece: Piece, *_: Any) -> Made:
        return (None, "ended with 1: out of memory") if piece.kernels == ("k1",) else ({}, "")

    left, stored, told = gathered(make, monkeypatch, tmp_path)
    assert left == [PIECES[1]] and len(stored) == 5
    assert told[1] == "timing on 1 kernel: ended with 1: out of memory"


def test_a_device_that_is_gone_makes_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other makes what it had begun, too."""
    gone = threading.Event()

    def make(piece: Piece, device: str, *_: Any) -> Made:
        if device == "7":
            gone.set()
            return None, "ended with 1: CUDA error"
        assert gone.wait(20)
        return {}, ""

    def fault_of(device: str) -> str:
        return "no CUDA GPU" if device == "7" and gone.is_set() else ""

    left, stored, told = gathered(make, monkeypatch, tmp_path, ("0", "7"), fault_of=fault_of)
    assert not left and len(stored) == len(PIECES)
    assert sum("device 7" in line for line in told) == 1 and "makes no further piece" in " ".join(told)


def test_a_device_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fault_of(device: str) -> str:
        return "no CUDA GPU" if device == "7" else ""

    def make(*_: Any) -> Made:
        raise AssertionError

    with pytest.raises(NotRun, match="device 7: no CUDA GPU"):
        gathered(make, monkeypatch, tmp_path, ("0", "7"), fault_of=fault_of)


def test_what_cannot_be_stored_ends_all_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also what the first device is at: it would go on for hours."""
    begun = threading.Event()

    def make(piece: Piece, device: str, place: Path, until: float, stop: threading.Event) -> Made:
        if device == "0":
            begun.set()
            assert stop.wait(20)
            return None, "stopped"
        assert begun.wait(20)
        return {}, ""

    def store(run: dict[str, Any]) -> str:
        raise writer.Refused("another commit")

    with pytest.raises(writer.Refused, match="another commit"):
        gathered(make, monkeypatch, tmp_path, ("0", "1"), store=store)


def program(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for python: body has request (what is asked for) and result (a path)."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, subprocess, sys, time\n"
        "assert sys.argv[1:3] == ['-m', 'dhp_safe_fa.gates.evidence.piece']\n"
        f"request, result = json.load(open(sys.argv[3])), sys.argv[4]\n{body}"
    )
    path.chmod(0o755)
    monkeypatch.setattr(gathering.sys, "executable", str(path))


def made(folder: Path, device: str = "", seconds: float = FOREVER, stop: threading.Event | None = None) -> Made:
    until = time.monotonic() + seconds
    return gathering._make(PIECES[0], device, folder / "0", until, stop or threading.Event())


def test_a_piece_is_a_process_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "json.dump([request, os.environ.get('CUDA_VISIBLE_DEVICES')], open(result, 'w'))\n"
    program(tmp_path, body, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    seconds = pytest.approx(FOREVER - gathering.GRACE_S, abs=1)
    asked = {"piece": {"gate": "timing", "kernels": ["k0"], "quick": False}, "seconds": seconds}
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


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "time.sleep(60)"])
def test_a_result_that_is_there_counts_however_the_process_ends(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, f"with open(result, 'w') as out:\n    out.write('{{}}')\n{end}\n", monkeypatch)
    assert made(tmp_path, seconds=3) == ({}, "")


def test_what_a_piece_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler that goes on would disturb the next piece. As soon as all is to end, not when time is up."""
    number = tmp_path / "number"
    body = (
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(number)!r}, 'w').write(str(child.pid))\nchild.wait()\n"
    )
    program(tmp_path, body, monkeypatch)
    stop = threading.Event()

    def stop_it() -> None:
        while not number.exists() or not number.read_text():
            time.sleep(0.05)
        stop.set()

    thread = threading.Thread(target=stop_it)
    thread.start()
    assert made(tmp_path, stop=stop)[0] is None
    thread.join()
    deadline = time.monotonic() + 10
    while is_running(int(number.read_text())):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def is_running(number: int) -> bool:
    """A process that has ended and that nobody waits for is none."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_sigterm_ends_it_like_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(piece: Piece, device: str, place: Path, until: float, stop: threading.Event) -> Made:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(20)
        return None, "stopped"

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        gathered(make, monkeypatch, tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("asked_for", "visible", "found"),
    [
        ([], None, [""]),
        ([], "2,3", [""]),
        (["0", "1"], None, ["0", "1"]),
        (["1", "0"], "2,3", ["3", "2"]),
        (["0"], "GPU-abc", ["GPU-abc"]),
    ],
)
def test_devices_are_numbered_among_those_that_are_visible(
    asked_for: list[str], visible: str | None, found: list[str]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gathering.visible(asked_for, environment) == found


@pytest.mark.parametrize(("asked_for", "said"), [(["2"], "leaves 2, numbered from 0"), (["0", "0"], "each GPU once")])
def test_devices_that_are_not_there_or_come_twice(asked_for: list[str], said: str) -> None:
    with pytest.raises(NotRun, match=said):
        gathering.visible(asked_for, {"CUDA_VISIBLE_DEVICES": "2,3"})


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
    monkeypatch.setattr(gathering, "_fault_of", lambda device: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = ["evidence", "--missing", "--devices", "0", "--minutes", "9", "--output", str(out)]
    assert cli.main(command) == 2
    said = capsys.readouterr().out
    assert "bitwise on 2 kernels, device 0: PASS, 0 s" in said
    assert "not run: timing on 1 kernel; the same with --missing goes on" in said
    assert asked == [Piece("bitwise", ("abc", "def"), False), Piece("timing", ("def",), False)]
    assert cli.main(command) == 0
    assert asked[2:] == [Piece("timing", ("def",), False)]
    assert evidence.compare(evidence.load(out), HELD, NOW).state == "fresh"
    assert cli.main(command) == 0
    assert "PASS: 0 of 2 kernels, nothing is missing" in capsys.readouterr().out and len(asked) == 3


def test_a_finding_is_named_where_nothing_is_missing(
    build: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = some_run()
    run["timing"][0] = gate_result("timing", "abc", FAIL)
    out = tmp_path / "evidence.json"
    writer.write(writer.assemble([run], KERNELS, LISTINGS, NOW), out)
    assert cli.main(["evidence", "--missing", "--output", str(out)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "abc: timing has failed on these bytes" in said and "FAIL: 0 of 2 kernels, nothing is missing" in said
    assert cli.main(["evidence", "--missing", "--gate", "sass", "counters", "--output", str(out)]) == 0


def test_what_is_no_pass_is_said() -> None:
    run = some_run()
    assert writer.said(run) == PASS
    run["sass"][0]["verdict"] = FAIL
    run["sass"][0]["secret_findings"] = [{"kind": "branch"}]
    run["counters"] = [gate_result("counters", "shipped kernels", NOT_RUN)]
    assert writer.said(run) == "abc: FAIL: branch; shipped kernels: NOT RUN: counters found something"
    assert writer.said(run, most=1) == "abc: FAIL: branch; and 1 more"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "0", "0"], "each GPU once"),
        (["--output", "."], "is a folder"),
        (["--missing", "--from", "run.json"], "not with --from"),
        (["--minutes", "5", "--from", "run.json"], "not with --from"),
        (["--missing", "--kernel", "nosuch"], "nosuch"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], said: str, build: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evidence", "--output", str(tmp_path / "evidence.json"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "evidence.json").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("--minutes", value) for value in ("0", "-1", "soon", "nan", "inf")), ("--piece", "0"), ("--piece", "1.5")],
)
def test_numbers_are_numbers(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evidence", option, value])
    assert f"'{value}' is no number of" in capsys.readouterr().err


def test_pieces_of_this_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code is looked at in a process of its own; what needs a GPU says that there is none."""
    kernels = _inspect.kernels()
    if not kernels:
        pytest.skip("no GPU kernel was built")
    name = str(kernels[0]["name"])
    stored: list[dict[str, Any]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NotRun, match="no CUDA GPU"):
        gathering.gather([Piece("timing", (name,), False)], ("",), FOREVER, tmp_path, writer.said, stored.append)
    told: list[str] = []

    def store(run: dict[str, Any]) -> str:
        stored.append(run)
        return writer.said(run)

    assert not gathering.gather([Piece("sass", (name,), False)], ("",), FOREVER, tmp_path, store, told.append)
    assert told[0].startswith("sass on 1 kernel: PASS, ")
    assert [report["verdict"] for report in stored[0]["sass"]] == [PASS]
    assert stored[0]["how"]["kernels"] == [name] and stored[0]["how"]["gates"] == ["sass"]
