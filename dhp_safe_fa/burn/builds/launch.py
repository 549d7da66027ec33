"""A launch of each case by a folder's build, for a profiler.

    python -m dhp_safe_fa.burn.builds.launch FOLDER FAMILY CASE...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dhp_safe_fa.bench.cases import parse_case
from dhp_safe_fa.burn.builds.library import Library
from dhp_safe_fa.burn.families import FAMILIES


def main(folder: str, family: str, *labels: str) -> None:
    call = FAMILIES[family].call(Library(Path(folder)))
    for case in (parse_case(label, "float16") for label in labels):
        shapes = case.shape, case.key_shape, case.key_shape
        q, k, v = (torch.randn(shape, device="cuda").to(case.torch_dtype) for shape in shapes)
        call(q, k, v, case.causal)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
