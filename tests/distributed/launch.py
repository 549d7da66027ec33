"""Runs a function in several processes of one machine, which are the ranks of a torch.distributed group (gloo)."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# Imported once for all ranks, which are forked from a process that has done nothing else: a Llama takes seconds.
IMPORTED = ["dhp_safe_fa", "torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama"]


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        value: what the function returned.
        error: the traceback of what it raised, or how the process ended without either; None if it returned.
        seconds: from the start of the first process to the end of this one.
    """

    value: Any
    error: str | None
    seconds: float


def _work(
    rank: int, processes: int, folder: Path, timeout: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine without a network has this one
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in place.items()})  # as torchrun does
    torch.set_num_threads(1)  # there are more processes than cores already
    path = folder / f"rank{rank}"
    try:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=processes, timeout=timedelta(seconds=timeout)
        )
        torch.save((function(*arguments), None), path)
        dist.barrier()
    except BaseException:
        torch.save((None, traceback.format_exc()), path)
    # Without the interpreter's end: a thread of torch's that is still there then aborts the process (seen once).
    os._exit(0)


def outcomes(
    function: Callable[..., Any], processes: int, folder: Path, *arguments: Any, timeout: int = 120, limit: int = 600
) -> list[Outcome]:
    """Runs function(*arguments) in each of `processes` new processes and waits for all, whatever happens to one.

    Args:
        function: of a module's top level; it finds its rank by torch.distributed.get_rank(). torch.save stores what it
            returns.
        folder: an existing one, in which a folder of this call's own is made.
        timeout: seconds that torch.distributed waits for another rank.
        limit: seconds after which a process that is still there is killed.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    start = time.monotonic()
    ranks = [
        context.Process(target=_work, args=(rank, processes, own, timeout, function, arguments), daemon=True)
        for rank in range(processes)
    ]
    for process in ranks:
        process.start()
    ended: dict[int, float] = {}
    while len(ended) < processes and time.monotonic() < start + limit:
        time.sleep(0.02)
        for rank, process in enumerate(ranks):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.monotonic() - start
    found = []
    for rank, process in enumerate(ranks):
        process.kill()
        process.join()
        value, error = None, f"ended with exit code {process.exitcode}" if rank in ended else f"killed after {limit} s"
        if (own / f"rank{rank}").exists() and rank in ended:
            value, error = torch.load(own / f"rank{rank}", weights_only=False)
        found.append(Outcome(value, error, ended.get(rank, limit)))
    return found


def run(
    function: Callable[..., Any], processes: int, folder: Path, *arguments: Any, timeout: int = 120, limit: int = 600
) -> list[Any]:
    """What function(*arguments) returned in each rank; arguments as for :func:`outcomes`.

    Raises:
        AssertionError: a rank failed; with the traceback of every one that did, the first to end first.
    """
    found = outcomes(function, processes, folder, *arguments, timeout=timeout, limit=limit)
    failed = [(outcome.seconds, rank, outcome.error) for rank, outcome in enumerate(found) if outcome.error is not None]
    assert not failed, "\n".join(
        f"rank {rank}, after {seconds:.1f} s: {error}" for seconds, rank, error in sorted(failed)
    )
    return [outcome.value for outcome in found]
