"""One piece of evidence, in a process of its own: python -m dhp_safe_fa.gates.evidence.piece [REQUEST RESULT]

REQUEST is a JSON file that holds a ``pieces.Piece``; RESULT is written as ``gates all --json`` does. Without them, and
for a gate that executes kernels, ends with 1 and says why if there is no GPU for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from dhp_safe_fa._files import write_whole

from .. import cli
from ..tools import NotRun
from .pieces import Piece


def require_gpu() -> None:
    from .. import subjects  # needs torch, which sass does not

    try:
        subjects.require_gpu()
    except (NotRun, ImportError) as error:
        sys.exit(str(error))


def main(request: Path, result: Path) -> None:
    piece = Piece(**json.loads(request.read_text(encoding="utf-8")))
    if piece.needs_gpu:
        require_gpu()
    screen = cli.Screen(Console(width=160), Console(stderr=True))
    quick = [piece.gate] if piece.quick else None
    arguments = argparse.Namespace(gate="all", peer=None, policy=None, kernel=list(piece.kernels), quick=quick)
    write_whole(json.dumps(cli.run_all(arguments, screen, [piece.gate])[1], indent=1) + "\n", result)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        require_gpu()
