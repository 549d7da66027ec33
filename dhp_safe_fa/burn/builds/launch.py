"""A launch of each case by a folder's build, for a profiler.

    python -m dhp_safe_fa.burn.builds.launch FOLDER FAMILY CASE...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dhp_safe_fa.bench.cases import LAYOUTS
from dhp_safe_fa.bench.directions import parse
from dhp_safe_fa.burn.builds.library import Library
from dhp_safe_fa.burn.families import FAMILIES


def main(folder: str, family: str, *labels: str) -> None:
    call = FAMILIES[family].call(Library(Path(folder)))
    generator = torch.Generator("cuda")
    for case in map(parse, labels):
        case.bind(call, case.draw("cuda", generator, LAYOUTS[-1]))()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
