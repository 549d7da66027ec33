"""What Nsight Compute runs for the gate `counters`: makes the launches that are to be counted, and no other in a range.

    python -m dhp_safe_fa.gates.counters.counted REQUEST

REQUEST is a JSON file that holds a ``counting.Request``. A line of standard output tells how far it is. What was
launched is written to the file of "steps", one ``counting.Step`` for each NVTX range dhp:NUMBER.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from .calls import Cold, calls_of
from .counting import Request


def main(path: Path) -> None:
    torch.set_grad_enabled(False)
    request = json.loads(path.read_text())
    steps = Path(request.pop("steps"))
    made: list[dict[str, object]] = []
    cold = Cold()
    for calls in calls_of(Request(**request)):
        torch.cuda.synchronize()
        # on for all data, because to start and stop it takes as long as a short launch: between them there may be
        # copies, and a kernel that is in no step's range is an error
        torch.cuda.profiler.start()
        for data in calls.data:
            calls.fill(data)
            cold.make()
            torch.cuda.nvtx.range_push(f"dhp:{len(made)}:")
            calls.call()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()
            made.append(asdict(calls.step(data)))
            print(f"{len(made)} {calls.name}", flush=True)
        torch.cuda.profiler.stop()
    steps.write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
