"""Makes pieces of evidence side by side, one at a time on each GPU, for so many minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .. import registry
from ..tools import NotRun
from .pieces import Piece

Run = dict[str, Any]
# A gate that can end early is told so long before time is up: it may have to look again at what it found.
GRACE_S = 90.0
_LEAST_S = 2 * GRACE_S  # and is not begun with less: controls come first
_TICK_S = 0.2  # how soon it is noticed that a piece has ended, or that it has to
_MODULE = "dhp_safe_fa.gates.evidence.piece"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
TIME_WAS_UP = "stopped, time was up"


def visible(asked_for: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is for each of some GPUs, by their numbers among those that are visible now; of none
    [""], which leaves it as it is. NotRun for one that is not, or that comes twice: it would be measured beside
    itself."""
    if len(set(asked_for)) < len(asked_for):
        raise NotRun(f"--devices {' '.join(asked_for)}: each GPU once")
    if _VISIBLE not in environment or not asked_for:
        return list(asked_for) or [""]
    names = [name.strip() for name in environment[_VISIBLE].split(",") if name.strip()]
    unknown = [one for one in asked_for if not (one.isdecimal() and int(one) < len(names))]
    if unknown:
        known = f"{_VISIBLE}={environment[_VISIBLE]} leaves {len(names)}, numbered from 0"
        raise NotRun(f"--devices {unknown[0]}: there is no such GPU: {known}")
    return [names[int(one)] for one in asked_for]


@dataclass
class _Queue:
    """The pieces that nobody has begun, and what pieces took: of each gate the most seconds a kernel.

    until: on time.monotonic; none of which it is known that it would take longer is begun.
    """

    left: list[Piece]
    until: float
    seconds: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Piece | None:
        with self.lock:
            remain = self.until - time.monotonic()
            for piece in self.left:
                takes = self.seconds.get(piece.gate, 0.0) * len(piece.kernels)
                if registry.gate(piece.gate).can_end_early:
                    takes = min(takes, _LEAST_S)
                if remain > 0 and takes <= remain:
                    self.left.remove(piece)
                    return piece
        return None

    def put_back(self, piece: Piece) -> None:
        with self.lock:
            self.left.insert(0, piece)

    def took(self, piece: Piece, seconds: float) -> None:
        with self.lock:
            self.seconds[piece.gate] = max(seconds / len(piece.kernels), self.seconds.get(piece.gate, 0.0))


def gather(
    pieces: Sequence[Piece],
    devices: Sequence[str],
    seconds: float,
    folder: Path,
    store: Callable[[Run], str],
    tell: Callable[[str], None],
) -> list[Piece]:
    """Make the pieces, and store each that has ended. Returns those without a result: not begun, or stopped when time
    was up, or ended by a fault, of which `tell` is told.

    Args:
        devices: CUDA_VISIBLE_DEVICES of each process at a time; "" leaves it as it is.
        folder: empty; for each piece's result and output.
        store: says in a line what it has stored. What it raises ends all.

    Raises:
        NotRun: a device is none, and some piece needs one. One that is none any more makes no further piece.
    """
    if any(piece.needs_gpu for piece in pieces):
        for device in devices:
            if fault := _fault_of(device):
                raise NotRun(f"{f'device {device}: ' if device else ''}{fault}")
    queue = _Queue(list(pieces), time.monotonic() + seconds)
    stop = threading.Event()
    without: list[Piece] = []
    alone = threading.Lock()  # whoever stores reads the file first

    def work(device: str) -> None:
        while not stop.is_set() and (piece := queue.take()):
            begin = time.monotonic()
            run, fault = _make(piece, device, folder / str(pieces.index(piece)), queue.until, stop)
            where = f"{piece}{f', device {device}' if device else ''}"
            is_gone = run is None and fault != TIME_WAS_UP and not stop.is_set() and bool(_fault_of(device))
            with alone:
                if stop.is_set() and run is None:
                    return
                if run is not None:
                    queue.took(piece, time.monotonic() - begin)
                    tell(f"{where}: {store(run)}, {time.monotonic() - begin:.0f} s")
                    continue
                tell(f"{where}: {fault}{'; the device makes no further piece' if is_gone else ''}")
            if is_gone:
                queue.put_back(piece)
                return
            without.append(piece)

    with ThreadPoolExecutor(len(devices)) as pool, _ended_like_by_ctrl_c():
        try:
            for worker in as_completed([pool.submit(work, device) for device in devices]):
                worker.result()
        finally:
            stop.set()  # whoever is still at it, if this one was interrupted, or could not store
    return [*without, *queue.left]


@contextmanager
def _ended_like_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, which schedulers send, would leave the processes of pieces behind."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fault_of(device: str) -> str:
    """Why no piece can be made there; empty if one can."""
    done = subprocess.run([sys.executable, "-m", _MODULE], env=_environment(device), capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no word"])[-1]


def _environment(device: str) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **({_VISIBLE: device} if device else {})}


def _make(piece: Piece, device: str, place: Path, until: float, stop: threading.Event) -> tuple[Run | None, str]:
    """The result of a piece, as soon as there is one; without one, why there is none."""
    request, result, log = (place.with_suffix(f".{kind}") for kind in ("request", "json", "log"))
    asked_for = {"piece": asdict(piece), "seconds": until - time.monotonic() - GRACE_S}
    request.write_text(json.dumps(asked_for), encoding="utf-8")
    command = [sys.executable, "-m", _MODULE, str(request), str(result)]
    with log.open("w") as out:
        # in a group of its own, with whatever it starts: ncu, nvdisasm
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(device), start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < until and not stop.is_set():
                time.sleep(_TICK_S)
        finally:
            is_late = process.poll() is None
            if is_late:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result.is_file():
        run: Run = json.loads(result.read_text(encoding="utf-8"))
        return run, ""
    if is_late:
        return None, TIME_WAS_UP
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return None, f"ended with {process.returncode}: {' '.join(last) or 'no word'} ({log})"
