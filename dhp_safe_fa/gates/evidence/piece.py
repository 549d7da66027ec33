"""One piece of evidence, in a process of its own: python -m dhp_safe_fa.gates.evidence.piece REQUEST RESULT

REQUEST is a JSON file that holds a ``pieces.Piece``; RESULT is written as ``gates all --json`` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from dhp_safe_fa._files import write_whole

from .. import cli, registry
from ..tools import NotRun


def main(request: Path, result: Path) -> None:
    asked = json.loads(request.read_text(encoding="utf-8"))
    gates = [asked["gate"]]
    if registry.gate(asked["gate"]).executes:
        from ..subjects import require_gpu

        try:
            require_gpu()
        except NotRun as error:
            sys.exit(str(error))
    screen = cli.Screen(Console(width=160), Console(stderr=True))
    quick = gates if asked["quick"] else None
    arguments = argparse.Namespace(gate="all", peer=None, policy=None, kernel=asked["kernels"], quick=quick)
    found = cli.run_all(arguments, screen, gates)[1]
    write_whole(json.dumps(found, indent=1) + "\n", result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
