"""The operators on CUDA streams, in CUDA graphs, and on a GPU that is not the current one."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness import LAYOUTS, Target, attend, needs_hopper, qkv, same_bits
from torch import Tensor

import dhp_safe_fa


@needs_hopper
def test_threads_with_streams_of_their_own(rng: torch.Generator) -> None:
    inputs = [qkv(rng, Target("cuda", torch.float16), 2, 4, 2, 130 + i, 200, 64) for i in range(4)]
    torch.cuda.synchronize()

    def work(tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outs = [dhp_safe_fa.attention(*tensors) for _ in range(25)]
        stream.synchronize()
        return outs

    with ThreadPoolExecutor(max_workers=4) as threads:
        results = list(threads.map(work, inputs))
    for tensors, outs in zip(inputs, results, strict=True):
        assert all(same_bits(out, dhp_safe_fa.attention(*tensors)) for out in outs)


# About 50 ms at 2 GHz: long enough that work on another stream would overtake.
SLEEP_CYCLES = 100_000_000


@needs_hopper
def test_runs_on_the_current_stream(rng: torch.Generator) -> None:
    """Inputs arrive late on a side stream; a launch on any other stream would read what was there before."""
    q, k, v = qkv(rng, Target("cuda", torch.float16), 2, 4, 2, 130, 200, 64)
    want = dhp_safe_fa.attention(q, k, v)
    late = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for tensor, value in zip(late, (q, k, v), strict=True):
            tensor.copy_(value)
        got = dhp_safe_fa.attention(*late)
        # What is enqueued next on this stream waits for the kernel.
        copy = got.clone()
        got.zero_()
    side.synchronize()
    assert same_bits(copy, want)


@needs_hopper
def test_returns_before_the_work_is_done(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.float16), 2, 4, 2, 130, 200, 64)
    dhp_safe_fa.attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    dhp_safe_fa.attention(q, k, v)
    assert not torch.cuda.current_stream().query(), "the call waited for the stream"
    torch.cuda.synchronize()


@needs_hopper
@pytest.mark.parametrize("layout", ["contiguous", "transposed_bshd", "rows_of_odd_stride"])
def test_cuda_graph(rng: torch.Generator, layout: str) -> None:
    """Captured once, replayed on new inputs."""
    target = Target("cuda", torch.bfloat16)
    tensors = [LAYOUTS[layout](t) for t in qkv(rng, target, 2, 4, 2, 130, 200, 64)]
    dhp_safe_fa.attention_lse(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = dhp_safe_fa.attention_lse(*tensors, is_causal=True, causal_offset=70)
    for _ in range(3):
        for tensor, value in zip(tensors, qkv(rng, target, 2, 4, 2, 130, 200, 64), strict=True):
            tensor.copy_(value)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want, want_lse = attend(*tensors, is_causal=True, causal_offset=70)
        assert same_bits(out, want) and same_bits(lse, want_lse)


FIRST_CALL_IN_A_CAPTURE = """
import torch, dhp_safe_fa
x = torch.randn(1, 2, 70, 64, device="cuda", dtype=torch.float16)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = dhp_safe_fa.attention(x, x, x)
graph.replay()
print(torch.equal(out, dhp_safe_fa.attention(x, x, x)))
"""


@needs_hopper
def test_first_call_of_a_process_may_be_captured() -> None:
    """Loading the kernel must not break a capture."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@needs_hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_tensors_on_another_gpu_than_the_current_one(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda:0", torch.float16), 2, 4, 2, 130, 200, 64)
    want = dhp_safe_fa.attention(q, k, v)
    with torch.cuda.device(0):
        got = dhp_safe_fa.attention(*(t.to("cuda:1") for t in (q, k, v)))
        assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    assert same_bits(got.cpu(), want.cpu())
    with pytest.raises(RuntimeError, match="device"):
        dhp_safe_fa.attention(q, k.to("cuda:1"), v)
