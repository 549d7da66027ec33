"""The processes that tests of this folder share, on every device where there are enough of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import HOPPER_MISSING
from processes import Processes

MOST = 4


def _too_few() -> str | None:
    if HOPPER_MISSING:
        return HOPPER_MISSING
    gpus = torch.cuda.device_count()
    return f"nothing was run over several GPUs: torch sees {gpus}" if gpus < 2 else None


FEW = _too_few()
ON_GPUS = pytest.param("cuda", marks=pytest.mark.skipif(FEW is not None, reason=str(FEW)))


# Of its own, in the place of the suite's: there are ranks on a device only where there are two of it.
@pytest.fixture(scope="session", params=["cpu", ON_GPUS])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def processes(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    count = MOST if device == "cpu" else min(MOST, torch.cuda.device_count())
    running = Processes(count, device, tmp_path_factory.mktemp("processes"))
    yield running
    running.end()
