"""Processes that stay: started once, each a rank of torch.distributed, they run one function of a test after the other.

Importing torch takes seconds a process, what is tested here a fraction of one.
"""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# Of the processes' own group. A failed rank leaves the others waiting this long.
PATIENCE = datetime.timedelta(seconds=60)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# The first ranks of all, by their number; made once, because making a group is a step that all processes take.
_groups: dict[int, Any] = {}


class Processes:
    """Args: how many, where their tensors are, and a new folder in which they meet."""

    def __init__(self, count: int, device: str, folder: Path) -> None:
        self.count, self.device = count, device
        self._running, self._pipes = [], []
        context = multiprocessing.get_context("spawn")
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, count, device, str(folder), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._running.append(process)
            self._pipes.append(ours)

    def begin(self, function: Callable[..., None], *arguments: object) -> None:
        """function(device, *arguments) in every process."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def outcome(self, rank: int) -> str | None:
        """Waits for this process: None, or the traceback of its error, or that it has died."""
        try:
            outcome: str | None = self._pipes[rank].recv()
        except EOFError:
            return "died"
        return outcome

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        self.begin(function, *arguments)
        outcomes = [self.outcome(rank) for rank in range(self.count)]
        wrong = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome is not None]
        assert not wrong, "\n".join(wrong)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._running:
            process.join()


def first(count: int) -> Any:
    """In a process: the group of the first ranks, or None in a process that is not one of them."""
    return _groups[count] if dist.get_rank() < count else None


def _serve(rank: int, count: int, device: str, folder: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine without a network has this one
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        BACKENDS[device], init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=PATIENCE
    )
    for size in range(1, count):
        _groups[size] = dist.new_group(list(range(size)))
    _groups[count] = dist.group.WORLD
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            function(device, *arguments)
            pipe.send(None)
        except BaseException:  # what pytest raises is no Exception
            pipe.send(traceback.format_exc())
    # Without the interpreter's end: a thread of torch's that is still there then aborts the process (seen once).
    os._exit(0)
