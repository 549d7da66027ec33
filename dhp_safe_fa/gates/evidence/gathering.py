"""Makes pieces of evidence side by side, one at a time on each GPU, for so many minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .pieces import Piece

Run = dict[str, Any]
_TICK_S = 0.2  # how soon it is noticed that a piece has ended, or that it has to


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
                if remain > 0 and self.seconds.get(piece.gate, 0.0) * len(piece.kernels) <= remain:
                    self.left.remove(piece)
                    return piece
        return None

    def took(self, piece: Piece, seconds: float) -> None:
        with self.lock:
            self.seconds[piece.gate] = max(seconds / len(piece.kernels), self.seconds.get(piece.gate, 0.0))


def gather(
    pieces: Sequence[Piece],
    devices: Sequence[str],
    seconds: float,
    folder: Path,
    store: Callable[[Run], None],
    tell: Callable[[str], None],
) -> list[Piece]:
    """Make the pieces, and store each that has ended. Returns those without a result: not begun, or stopped when time
    was up, or ended by a fault, of which `tell` is told.

    Args:
        devices: CUDA_VISIBLE_DEVICES of each process at a time; "" leaves it as it is.
        folder: for each piece's result and output; it is emptied first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    queue = _Queue(list(pieces), time.monotonic() + seconds)
    stop = threading.Event()
    without: list[Piece] = []
    at_a_time = threading.Lock()  # whoever stores reads the file first

    def work(device: str) -> None:
        while not stop.is_set() and (piece := queue.take()):
            begin = time.monotonic()
            run, fault = _make(piece, device, folder / str(pieces.index(piece)), queue.until, stop)
            queue.took(piece, time.monotonic() - begin)
            where = f"{piece}{f', device {device}' if device else ''}"
            with at_a_time:
                if run is None:
                    without.append(piece)
                    tell(f"{where}: {fault}")
                else:
                    store(run)
                    tell(f"{where}: {time.monotonic() - begin:.0f} s")

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            workers = [pool.submit(work, device) for device in devices]
            for worker in workers:
                worker.result()
        finally:
            stop.set()  # what is still at it, if this one was interrupted or could not store
    return [*without, *queue.left]


def _make(piece: Piece, device: str, place: Path, until: float, stop: threading.Event) -> tuple[Run | None, str]:
    """The result of a piece; without one, why there is none."""
    request, result, log = (place.with_suffix(f".{kind}") for kind in ("request", "json", "log"))
    request.write_text(json.dumps(asdict(piece)), encoding="utf-8")
    own = {"CUDA_VISIBLE_DEVICES": device} if device else {}
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "dhp_safe_fa.gates.evidence.piece", str(request), str(result)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": path, **own})
        try:
            while process.poll() is None:
                if time.monotonic() > until or stop.is_set():
                    return None, "stopped, time was up"
                time.sleep(_TICK_S)
        finally:
            process.kill()
            process.wait()
    if process.returncode or not result.is_file():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return None, f"ended with {process.returncode}: {' '.join(last) or 'no word'} ({log})"
    run: Run = json.loads(result.read_text(encoding="utf-8"))
    return run, ""
