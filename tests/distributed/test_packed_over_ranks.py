"""Packed sequences over ranks: each row has the bits of a call for its sequence alone, wherever shards are cut."""

from __future__ import annotations

import random
from itertools import count, pairwise

import pytest
import torch
from harness import Target, normal, same_bits
from processes import Processes, first
from test_context_parallel import DTYPES, uneven
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.integrations.context_parallel import ContextParallel
from dhp_safe_fa.integrations.context_parallel.placement import Together, chunks, held, packed_together


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("balanced", [False, True])
def test_which_rows_a_rank_has_of_a_sequence(ranks: int, balanced: bool) -> None:
    """Every row once, in its place in its sequence and in what its rank holds."""
    begins, length = [0, 0, 3, 20, 21, 21, 40], 43
    together = packed_together(begins, begins, True, length, length)
    assert together[1] == Together((0, 3), (0, 3), 0)
    assert together[-2:] == [Together((40, 43), (43, 43), 0), Together((43, 43), (40, 43), 0)]
    cut = chunks(length, ranks, balanced)
    found = []
    for rank in range(ranks):
        own = [chunk for chunk in cut if chunk.rank == rank]
        rows = [row for chunk in own for row in range(chunk.start, chunk.stop)]
        for sequence in together:
            for local, before in held(own, sequence.queries):
                here = rows[local]
                start = sequence.queries[0] + before
                assert here == list(range(start, start + len(here)))
                found += here
    assert sorted(found) == list(range(length))


def test_where_queries_stand() -> None:
    bottom, top = (packed_together([0, 2, 9], [0, 5, 6], is_bottom, 9, 6)[:2] for is_bottom in (True, False))
    assert [each.causal_offset for each in bottom] == [3, -6]
    assert [each.causal_offset for each in top] == [0, 0]


def begins(choose: random.Random, sequences: int, most: int) -> list[int]:
    found = [0]
    for _ in range(sequences):
        found.append(found[-1] + choose.choice([0, 1, choose.randrange(most), choose.randrange(most)]))
    return found


class PackedCase:
    """Packed sequences that a seed chooses, the same on every rank; behind them rows that belong to none."""

    def __init__(self, seed: int, device: str) -> None:
        choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
        target = Target(device, DTYPES[device][seed % len(DTYPES[device])])
        head_dim = 8 * choose.choice([1, 4, 8, 10, 16, 32])
        key_heads, group, sequences = choose.choice([1, 2]), choose.choice([1, 2, 3]), choose.choice([1, 2, 5, 9])
        self.begins_q, self.begins_k = begins(choose, sequences, 150), begins(choose, sequences, 200)
        queries, keys = (each[-1] + choose.choice([0, 7]) for each in (self.begins_q, self.begins_k))
        self.q = normal(rng, (queries, key_heads * group, head_dim), target)
        self.k, self.v = (normal(rng, (keys, key_heads, head_dim), target) for _ in range(2))
        self.grad_out = normal(rng, self.q.shape, target)
        self.grad_lse = torch.randn(self.q.shape[1::-1], generator=rng).to(device)
        if self.q.dtype == torch.float64:
            self.grad_lse = self.grad_lse.double()
        self.scale, self.is_causal = choose.choice([None, 0.3]), choose.random() < 0.75
        self.alignment = choose.choice(["bottom-right", "top-left"])
        self.window, self.softcap = (-1, -1), None
        if device == "cpu":  # CUDA has gradients of neither
            self.window = choose.choice([(-1, -1), (-1, -1), (20, 0), (130, 9), (-1, 3)])
            self.softcap = choose.choice([None, None, 2.0])

    def options(self) -> dict[str, object]:
        names = ("scale", "is_causal", "alignment", "window", "softcap")
        return {name: getattr(self, name) for name in names}

    def alone(self) -> tuple[Tensor, ...]:
        """out, lse, dq, dk and dv by a call for each sequence alone, and what rows of none have."""
        out, dq, dk, dv = (torch.zeros_like(t) for t in (self.q, self.q, self.k, self.v))
        lse = torch.full_like(self.grad_lse, -torch.inf)
        for (q0, q1), (k0, k1) in zip(pairwise(self.begins_q), pairwise(self.begins_k), strict=True):
            own = [
                t[begin:end].transpose(0, 1)[None].detach().requires_grad_()
                for t, begin, end in ((self.q, q0, q1), (self.k, k0, k1), (self.v, k0, k1))
            ]
            offset = (k1 - k0) - (q1 - q0) if self.alignment == "bottom-right" else 0
            placed = self.is_causal or self.window != (-1, -1)
            one, one_lse = dhp_safe_fa.attention_lse(
                *own,
                is_causal=self.is_causal,
                scale=self.scale,
                causal_offset=offset if placed else 0,
                window=self.window,
                softcap=self.softcap,
            )
            of = self.grad_out[q0:q1].transpose(0, 1)[None], self.grad_lse[None, :, q0:q1]
            gradients = torch.autograd.grad((one, one_lse), own, of)
            out[q0:q1], lse[:, q0:q1] = one[0].detach().transpose(0, 1), one_lse[0].detach()
            dq[q0:q1], dk[k0:k1], dv[k0:k1] = (t[0].transpose(0, 1) for t in gradients)
        return out, lse, dq, dk, dv

    def begins_as(self, tensors_on: str) -> tuple[Tensor, Tensor]:
        q, k = (torch.tensor(each, dtype=torch.int32, device=tensors_on) for each in (self.begins_q, self.begins_k))
        return q, k


def as_each_alone(device: str, ranks: int, seeds: range) -> None:
    group = first(ranks)
    if group is None:
        return
    for seed in seeds:
        case = PackedCase(seed, device)
        expected = case.alone()
        longest = max(map(len, (case.q, case.k)))
        whole = dhp_safe_fa.attention_varlen(
            case.q, case.k, case.v, *case.begins_as(device), longest, longest, **case.options()
        )
        assert same_bits(whole, expected[0])
        for balanced in (False, True):
            parallel = ContextParallel(group, balanced=balanced, heads_at_once=random.Random(seed).choice([None, 1]))
            mine = [parallel.shard(t, dim=0).requires_grad_() for t in (case.q, case.k, case.v)]
            given = *mine, *case.begins_as(device)
            out, lse = parallel.attention_varlen_lse(*given, **case.options())
            of = parallel.shard(case.grad_out, dim=0), parallel.shard(case.grad_lse, dim=1)
            got = [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), mine, of)]
            for name, here, there in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
                there = parallel.shard(there, dim=1 if name == "lse" else 0)
                assert same_bits(here, there), f"{name}: seed {seed}, {ranks} ranks, {balanced}, {vars(case)}"
            assert same_bits(parallel.attention_varlen(*given, **case.options()).detach(), out.detach())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bits_are_those_of_each_sequence_alone(processes: Processes, ranks: int, session_seed: int) -> None:
    if ranks > processes.count:
        pytest.skip(f"torch sees {processes.count} GPUs")
    print(f"to repeat these inputs: pytest --seed {session_seed}")
    start = session_seed % 2**20 * 16
    processes.run(as_each_alone, ranks, range(start, start + 16))


def of_any_lengths(device: str) -> None:
    """Shards of what ranks happen to have, none at all included."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    case = next(case for case in (PackedCase(seed, device) for seed in count()) if min(len(case.q), len(case.k)) > 99)
    out, lse, *gradients = case.alone()
    of_queries, of_keys = uneven(len(case.q), ranks), uneven(len(case.k), ranks)[::-1]
    split = {"q": of_queries, "k": of_keys, "v": of_keys}
    mine = [getattr(case, name).split(lengths)[rank].requires_grad_() for name, lengths in split.items()]
    got, got_lse = ContextParallel().attention_varlen_lse(*mine, *case.begins_as(device), **case.options())
    assert same_bits(got.detach(), out.split(of_queries)[rank])
    assert same_bits(got_lse.detach(), lse.split(of_queries, dim=1)[rank])
    of = case.grad_out.split(of_queries)[rank], case.grad_lse.split(of_queries, dim=1)[rank]
    for here, there, lengths in zip(
        torch.autograd.grad((got, got_lse), mine, of), gradients, split.values(), strict=True
    ):
        assert same_bits(here, there.split(lengths)[rank])


def test_uneven_shards(processes: Processes) -> None:
    processes.run(of_any_lengths)


def where_only_some_gradients_are_needed(device: str) -> None:
    case = PackedCase(4, device)
    expected = dict(zip("qkv", case.alone()[2:], strict=True))
    parallel = ContextParallel(balanced=True)
    for needed in ("q", "k", "v", "kv"):
        mine = [parallel.shard(getattr(case, n), dim=0).requires_grad_(n in needed) for n in "qkv"]
        out, lse = parallel.attention_varlen_lse(*mine, *case.begins_as(device), **case.options())
        of = parallel.shard(case.grad_out, dim=0), parallel.shard(case.grad_lse, dim=1)
        torch.autograd.backward((out, lse), of)
        for name, tensor in zip("qkv", mine, strict=True):
            assert (tensor.grad is not None) == (name in needed)
            assert tensor.grad is None or same_bits(tensor.grad, parallel.shard(expected[name], dim=0))


def test_gradients_that_are_needed(processes: Processes) -> None:
    processes.run(where_only_some_gradients_are_needed)


# What rank 1 gives instead, and what the others then say.
MISTAKES = [
    ({"begins_q": [0, 3, 8]}, r"cu_seqlens_q: \(SHA-256\) \w{16} here, on rank 0, and \(SHA-256\) \w{16} on rank 1"),
    ({"begins_k": [0, 7, 8]}, r"cu_seqlens_k: \(SHA-256\) "),
    ({"alignment": "top-left"}, "alignment: bottom-right True here, on rank 0, and False on rank 1"),
    ({"window": (3, 0)}, "window: left -1 here, on rank 0, and 3 on rank 1"),
    ({"softcap": 2.0}, "softcap: None here, on rank 0, and 2 on rank 1"),
]
# What is refused alike, whether one rank gives it or all.
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"begins_q": [0, 5, 4]}, r"cu_seqlens_q: \[0, 5, 4\]; supported: ascending numbers, from 0"),
    ({"begins_k": [1, 5, 8]}, r"cu_seqlens_k: \[1, 5, 8\]; supported: ascending numbers, from 0"),
    ({"begins_k": [0, 5]}, r"cu_seqlens_k: shape \[2\]; expected \[3\]"),
    ({"cu_seqlens_k": [0, 4, 8]}, r"cu_seqlens_k: list; expected a tensor \[sequences \+ 1\]"),
    ({"cu_seqlens_q": None}, r"cu_seqlens_q: NoneType; expected a tensor"),
    ({"q": None}, r"q: NoneType; expected a tensor \[rows, H, D\]"),
    ({"v": [1.0]}, r"v: list; expected a tensor \[rows, H, D\]"),
    ({"alignment": "left"}, "alignment: 'left'; supported: 'bottom-right', 'top-left'"),
    ({"alignment": None}, "alignment: None; supported: "),
    ({"window": (-2, 0)}, r"window: \(-2, 0\); supported: on each side -1"),
    ({"window": (1, 2, 3)}, r"window: \(1, 2, 3\); expected \(left, right\)"),
    ({"window": None}, r"window: None; expected \(left, right\)"),
    ({"window": ("3", 0)}, r"window: \('3', 0\); expected \(left, right\)"),
    ({"window": (torch.tensor(3.0), 0)}, r"window: .*; expected \(left, right\)"),
    ({"softcap": "a"}, "softcap: 'a'; expected a number, or None"),
    ({"softcap": -1.0}, "softcap: -1; supported: 0 for none"),
    ({"scale": "a"}, "scale: 'a'; expected a number, or None"),
    ({"is_causal": None}, "is_causal: None; supported: True or False"),
    ({"dtype": torch.int64}, "cu_seqlens_q: dtype int64; expected int32"),
    ({"rank": 4}, r"q: rank 4; expected 3 dimensions \[tokens, H, D\]"),
]


def call(device: str, change: dict[str, object]) -> Tensor:
    given: dict[str, object] = {"begins_q": [0, 4, 8], "begins_k": [0, 4, 8], "dtype": torch.int32, "rank": 3, **change}
    begins_q, begins_k, dtype, rank = (given.pop(name) for name in ("begins_q", "begins_k", "dtype", "rank"))
    parallel = ContextParallel()
    q = parallel.shard(torch.ones(8, 1, 16, dtype=torch.float16, device=device), dim=0)
    q = q if rank == 3 else q[None]
    begins = {
        name: torch.tensor(each, dtype=dtype, device=device)
        for name, each in (("cu_seqlens_q", begins_q), ("cu_seqlens_k", begins_k))
    }
    return parallel.attention_varlen(**{"q": q, "k": q, "v": q, **begins, **given})


def disagreements(device: str) -> None:
    rank = torch.distributed.get_rank()
    for change, expected in MISTAKES:
        with pytest.raises(RuntimeError, match=None if rank == 1 else expected.replace("rank 0", f"rank {rank}")):
            call(device, change if rank == 1 else {})
    for change, expected in REFUSED:
        with pytest.raises(RuntimeError, match=expected):
            call(device, change)
        alone = expected if rank == 1 else "rank 1 refused its arguments, with an error of its own"
        with pytest.raises(RuntimeError, match=alone):
            call(device, change if rank == 1 else {})
    with pytest.raises(RuntimeError, match="cu_seqlens_q: ends with 9, but all ranks together have 8 rows"):
        call(device, {"begins_q": [0, 5, 9]})
    call(device, {})  # nobody is a step behind


def test_what_is_refused(processes: Processes) -> None:
    processes.run(disagreements)


def what_says_the_same_in_other_words(device: str) -> None:
    """A list for a window, as out of a configuration file; 0 for no soft cap."""
    rank = torch.distributed.get_rank()
    expected = call(device, {})
    for given in ({"window": [-1, -1]}, {"softcap": 0.0}, {"window": [-1, -1], "begins_q": [0, 3, 8]}):
        whole = call(device, given if rank == 1 or "begins_q" in given else {})
        assert "begins_q" in given or same_bits(whole, expected)
    parallel, q = ContextParallel(heads_at_once=50), torch.ones(2, 1, 16, dtype=torch.float16, device=device)
    one = parallel.attention(q[None].transpose(1, 2), *[q[None].transpose(1, 2)] * 2, window=[-1, -1])  # type: ignore[arg-type]
    assert one.shape == (1, 1, 2, 16)


def test_other_words(processes: Processes) -> None:
    processes.run(what_says_the_same_in_other_words)


def how_results_lie(device: str) -> None:
    """As those of one process, whatever the strides of q; and gradients of one leaf are added in the same order."""
    rng = torch.Generator().manual_seed(5)
    parallel = ContextParallel()
    x = normal(rng, (60, 2, 16), Target(device, torch.float16))
    begins = torch.tensor([0, 25, 60], dtype=torch.int32, device=device)
    mine = parallel.shard(x, dim=0)
    for q in (mine, mine.transpose(0, 1).contiguous().transpose(0, 1), mine[:, :1].expand(-1, 2, -1)):
        out, lse = parallel.attention_varlen_lse(q, mine, mine, begins, begins, is_causal=True)
        assert out.is_contiguous() and lse.is_contiguous()
    if device == "cpu":
        whole, local = x.clone().requires_grad_(), mine.clone().requires_grad_()
        dhp_safe_fa.attention_varlen(whole, whole, whole, begins, begins, 60, 60).sum().backward()
        parallel.attention_varlen(local, local, local, begins, begins).sum().backward()
        assert whole.grad is not None and local.grad is not None
        assert same_bits(local.grad, parallel.shard(whole.grad, dim=0))


def test_how_results_lie(processes: Processes) -> None:
    processes.run(how_results_lie)
