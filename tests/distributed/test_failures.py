"""Ranks that fail: the helper says how each ended, and a training run of which one rank is gone comes to an end."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import launch
import pytest
import small_layer
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

LAST = 1  # the rank that fails, of two
STEP = 3  # and the step before which it does
TIMEOUT, STUCK = 5, 25  # seconds: of the group, and that the rank is late


def say_or_fail() -> int:
    assert dist.get_rank() != LAST, "on purpose"
    return dist.get_rank()


def test_every_traceback_is_shown(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1, (?s:.*)in say_or_fail(?s:.*)AssertionError: on purpose"):
        launch.run(say_or_fail, 2, tmp_path)


def train_until(end: str) -> None:
    """Tensor parallel training, in which the last rank dies or is late."""

    def fail(step: int) -> None:
        if dist.get_rank() == LAST and step == STEP:
            if end == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(STUCK)

    # That a rank has died is seen before any time-out; and a loaded machine must not meet one.
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT if end == "is late" else 60))
    small_layer.train(DeviceMesh.from_group(group, "cpu"), each_step=fail)


def test_a_rank_dies(tmp_path: Path) -> None:
    survivor, dead = launch.outcomes(train_until, 2, tmp_path, "dies")
    assert dead.error == f"ended with exit code {-signal.SIGKILL}"
    assert survivor.error is not None and "RuntimeError" in survivor.error and "gloo" in survivor.error
    assert survivor.seconds - dead.seconds < TIMEOUT


@pytest.mark.long
def test_a_rank_is_late(tmp_path: Path) -> None:
    """The other one does not wait for it longer than it was told to."""
    waiting, late = launch.outcomes(train_until, 2, tmp_path, "is late")
    assert waiting.error is not None and "RuntimeError" in waiting.error and "gloo" in waiting.error
    assert late.error is not None and waiting.seconds < late.seconds - (STUCK - TIMEOUT) / 2
