"""One piece of evidence, in a process of its own: python -m dhp_safe_fa.gates.evidence.piece [REQUEST RESULT]

REQUEST is a JSON file that holds a ``pieces.Piece``, and the seconds after which a gate that can has to come to an end
(``registry.Gate.can_end_early``); RESULT is written as ``gates all --json`` does. Without them, and for a gate that
executes kernels, ends with 1 and says why if there is no GPU for it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from dhp_safe_fa._files import write_whole

from .. import cli, registry
from ..tools import NotRun
from .pieces import Piece


def require_gpu() -> None:
    from .. import subjects  # needs torch, which sass does not

    try:
        subjects.require_gpu()
    except (NotRun, ImportError) as error:
        sys.exit(str(error))


class _Clocked(Progress):
    """Shows nothing. When time is up it says so once: what a gate does from then on is needed for its verdicts."""

    def __init__(self, until: float) -> None:
        super().__init__(disable=True)
        self._until = until

    def update(self, *_: Any, **__: Any) -> None:
        if time.monotonic() > self._until:
            self._until = math.inf
            raise TimeoutError("time was up")


@dataclass
class _Screen(cli.Screen):
    until: float

    def progress(self) -> Progress:
        return _Clocked(self.until)


def main(request: Path, result: Path) -> None:
    begin = time.monotonic()
    asked_for = json.loads(request.read_text(encoding="utf-8"))
    piece = Piece(**asked_for["piece"])
    if piece.needs_gpu:
        require_gpu()
    until = begin + asked_for["seconds"] if registry.gate(piece.gate).can_end_early else math.inf
    screen = _Screen(Console(width=160), Console(stderr=True), until)
    quick = [piece.gate] if piece.quick else None
    arguments = argparse.Namespace(gate="all", peer=None, policy=None, kernel=list(piece.kernels), quick=quick)
    write_whole(json.dumps(cli.run_all(arguments, screen, [piece.gate])[1], indent=1) + "\n", result)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        require_gpu()
