"""Memory that all ranks can read, without GPUs: what is written where, and read from where, by any number of ranks in
one process; and that nobody writes where somebody may still read. Streams and the group are stand-ins that keep order.
With GPUs test_context_parallel.py and test_shares.py go this way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel import attention, mapped, placement, shares
from dhp_safe_fa.integrations.context_parallel.mapped import BUFFERS, Buffer, Mapped, Read, send

SIZE = 1 << 20


class InOrder:
    """A stream, and an event, of a device that does one thing after the other."""

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record_event(self) -> InOrder:
        return self


class Group:
    """Each rank is a thread."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.meeting, self.of_thread = ranks, threading.Barrier(ranks), threading.local()

    def size(self) -> int:
        return self.ranks

    def run(self, of_rank: Callable[[int], None]) -> None:
        def in_thread(rank: int) -> None:
            self.of_thread.rank = rank
            try:
                of_rank(rank)
            except BaseException:
                self.meeting.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as threads:
            for done in [threads.submit(in_thread, rank) for rank in range(self.ranks)]:
                done.result()


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: InOrder())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda _self, _stream: None)
    monkeypatch.setattr(mapped.dist, "get_rank", lambda group: group.of_thread.rank)
    monkeypatch.setattr(mapped.dist, "all_reduce", lambda _tensor, group: group.meeting.wait())
    yield


def memories(ranks: int) -> list[Mapped]:
    """Of each rank, two buffers that all can read."""
    shared = [[torch.zeros(SIZE, dtype=torch.uint8) for _ in range(ranks)] for _ in range(BUFFERS)]
    stream: Any = InOrder()
    cpu = torch.device("cpu")
    return [
        Mapped(cpu, stream, torch.zeros(1), [Buffer(of_ranks[rank], of_ranks, None) for of_ranks in shared])
        for rank in range(ranks)
    ]


def local(whole: Tensor, chunks: list[placement.Chunk], rank: int) -> Tensor:
    return torch.cat([whole[:, :, c.start : c.stop] for c in chunks if c.rank == rank] or [whole[:, :, :0]], dim=2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_whole_sequences_arrive(ranks: int, seed: int) -> None:
    """Calls one after the other, steps of several tensors of several dtypes, uneven and empty shards."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    group: Any = Group(ranks)
    of_ranks = memories(ranks)

    def arrive(chunks: list[Any], wholes: list[list[Tensor]], rank: int) -> None:
        steps: Any = [(c, [local(t, c, rank) for t in w]) for c, w in zip(chunks, wholes, strict=True)]
        for start, wanted in zip(send(of_ranks[rank], group, steps, dim=2), wholes, strict=True):
            arriving: Read = start()
            arriving.begin()
            for one, other in zip(arriving.wait(), wanted, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)

    for _ in range(4):
        wholes, chunks = [], []
        for _ in range(chosen.randint(1, 3)):
            rows = chosen.randint(1, 40)
            cut: Any = placement.chunks(rows, ranks, chosen.random() < 0.5)
            if chosen.random() < 0.3:
                cut = placement.chunks_held((rows, *[0] * (ranks - 1)), False)
            chunks.append(cut)
            wholes.append(
                [
                    torch.randn(2, 3, rows, 8).bfloat16(),
                    torch.randn(2, 3, rows),
                    torch.randn(2, 3, rows, 8).bfloat16(),
                    torch.randint(0, 255, (2, 3, rows), dtype=torch.uint8),
                ][: chosen.randint(1, 4)]
            )
        group.run(partial(arrive, chunks, wholes))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("eighths", "heads", "count"),
    [
        *((attention.EIGHTHS, heads, min(heads, 3)) for heads in (1, 2, 3, 7, 8, 12, 32)),
        *((shares.EIGHTHS, heads, min(heads, 4)) for heads in (1, 2, 3, 8, 12, 32)),
        (shares.EIGHTHS, 7, 3),  # seven eighths of them are all
    ],
)
def test_all_heads_arrive_once(
    monkeypatch: pytest.MonkeyPatch, eighths: tuple[int, ...], heads: int, count: int, group: int
) -> None:
    """In parts of whole groups, none of them empty, the first one small."""
    monkeypatch.setattr(attention, "mapped", lambda _group, _device: object())
    options = attention.Options(False, None, (-1, -1), None)
    anyone: Any = None
    call = attention.Call(anyone, [], [], [], heads, options, is_packed=False, with_lse=False, number=0)
    q, k = torch.empty(1, heads * group, 1, 8), torch.empty(1, heads, 1, 8)
    parts = list(call.heads_arriving(q, k, eighths))
    assert [h for _, keys in parts for h in range(heads)[keys]] == list(range(heads))
    assert [h for queries, _ in parts for h in range(heads * group)[queries]] == list(range(heads * group))
    assert all(keys.start < keys.stop and queries.stop == keys.stop * group for queries, keys in parts)
    assert len(parts) == count


def test_nobody_writes_where_others_may_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a first call that begin after the second one was written: the third call's writer has to meet first."""
    group: Any = Group(2)
    group.of_thread.rank = 0
    of_rank = memories(2)[0]
    tensor, chunks = torch.randn(1, 1, 4, 8), placement.chunks(8, 2, False)
    events: list[str] = []
    monkeypatch.setattr(mapped.dist, "all_reduce", lambda _tensor, group: events.append("meet"))
    _early, late = send(of_rank, group, [(chunks, [tensor]), (chunks, [tensor])], dim=2)
    send(of_rank, group, [(chunks, [tensor])], dim=2)
    assert events == ["meet"] * 2, "once for each call"
    late().begin()  # of the first buffer, after all have met for the second
    send(of_rank, group, [(chunks, [tensor])], dim=2)
    assert events == ["meet"] * 4, "once before it writes there again, once after"
    send(of_rank, group, [(chunks, [tensor])], dim=2)
    assert events == ["meet"] * 5, "nothing was read from the second buffer since they met"
