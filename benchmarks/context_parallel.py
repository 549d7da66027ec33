"""Context parallel attention over NCCL: whether it has the bits of one GPU, and its time beside one GPU's and torch's.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --json run.json

Every rank has the same inputs, holds its part of them, and compares what it gets with its rows of what one GPU computes
of the whole. Times are those of the slowest rank, medians; torch's context_parallel works with the back end that is
named. Needs as many Hopper GPUs as processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import dhp_safe_fa
from dhp_safe_fa.bench.environment import environment
from dhp_safe_fa.integrations.context_parallel import ContextParallel

# B, Hq, Hk, S, D: grouped heads, and lengths that no tile and no number of ranks divides.
BITS = [(2, 8, 2, 3001, 64), (2, 8, 2, 3001, 128), (1, 16, 16, 4096, 64), (1, 16, 16, 4096, 128)]
SPEED = (1, 32, 65536, 128)  # B, H, S, D
MULTIPLE = 128  # of rows, where chunks begin: gradients take five products
# Shape, multiple, heads at once, whether causal: cut anywhere, and so that gradients take five products and travel
# while others are computed; and one so long that copies and sums are on their way beside every kernel.
CASES = [
    *((shape, *cut, is_causal) for shape in BITS for cut in ((1, None), (MULTIPLE, 1)) for is_causal in (False, True)),
    ((SPEED[0], SPEED[1], *SPEED[1:]), MULTIPLE, None, True),
]
HEADS_AT_ONCE = (None, 8)
ROUNDS = 15
SEED = 41
NAMES = ("out", "lse", "dq", "dk", "dv")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    """bfloat16, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


def everything(attend: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], is_causal: bool) -> list[Tensor]:
    """out, lse and the gradients of q, k and v; the last input is grad_out."""
    *qkv, grad_out = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    out, lse = attend(*leaves, is_causal=is_causal)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def compare(mesh: DeviceMesh, repeats: int) -> Iterator[dict[str, Any]]:
    """How often every rank had the bits of one GPU in each result, and how often a rank had NaN."""
    for (b, hq, hk, s, d), multiple, heads, is_causal in CASES:
        parallel = ContextParallel(mesh, balanced=True, multiple=multiple, heads_at_once=heads)
        whole = draw((b, hq, s, d), (b, hk, s, d), (b, hk, s, d), (b, hq, s, d))
        wanted = [parallel.shard(t, dim=2) for t in everything(dhp_safe_fa.attention_lse, whole, is_causal)]
        mine = [parallel.shard(tensor, dim=2).contiguous() for tensor in whole]
        equal, nan = torch.zeros(2, len(NAMES), device="cuda")
        for _ in range(repeats):
            found = everything(parallel.attention_lse, mine, is_causal)
            same = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
            equal += torch.tensor(same, device="cuda")
            nan += torch.stack([one.isnan().any() for one in found])
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        dist.all_reduce(nan, dist.ReduceOp.MAX)
        counts, nans = (dict(zip(NAMES, map(int, of.tolist()), strict=True)) for of in (equal, nan))
        case = {"case": [b, hq, hk, s, d], "multiple": multiple, "heads_at_once": heads, "is_causal": is_causal}
        yield {**case, "repeats": repeats, "equal": counts, "nan": nans}


def milliseconds(call: Callable[[], object]) -> float:
    """Median over ROUNDS of the slowest rank's time."""
    times = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times[1:])


def measure(attend: Attend, inputs: list[Tensor]) -> dict[str, Any]:
    """Forward, and forward and backward, causal."""
    *qkv, grad_out = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    return {
        "forward_ms": milliseconds(forward),
        "both_ms": milliseconds(lambda: torch.autograd.grad(attend(*leaves), leaves, grad_out)),
    }


@contextmanager
def spread_by_torch(mesh: DeviceMesh, backend: SDPBackend, buffers: list[Tensor]) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel

    spread = context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers)
    )
    with spread, sdpa_kernel(backend):
        yield


def times(mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    b, h, s, d = SPEED
    shapes = [(b, h, s, d)] * 4
    whole = draw(*shapes)
    yield {"who": "one GPU", **measure(lambda q, k, v: dhp_safe_fa.attention(q, k, v, is_causal=True), whole)}
    for heads in HEADS_AT_ONCE:
        parallel = ContextParallel(mesh, balanced=True, multiple=MULTIPLE, heads_at_once=heads)
        mine = [parallel.shard(tensor, dim=2).contiguous() for tensor in whole]
        label = f"heads_at_once={heads}"
        yield {"who": label, **measure(lambda q, k, v, p=parallel: p.attention(q, k, v, is_causal=True), mine)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        label = f"torch context_parallel, {backend.name.split('_')[0].lower()}"
        buffers = draw(*shapes)
        try:
            with spread_by_torch(mesh, backend, buffers):
                sdpa: Attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                yield {"who": label, **measure(sdpa, buffers)}
        except (RuntimeError, ImportError, ValueError, NotImplementedError) as error:
            yield {"who": label, "reason": str(error).splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    parser.add_argument("--repeats", type=int, default=100, help="of each case whose bits are compared")
    parser.add_argument("--no-speed", action="store_true", help="compare bits only")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("run it by torchrun, which starts a process for each GPU")
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many Hopper GPUs")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")  # what has to agree is compared on CPUs, and no GPU is waited for
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    is_first = dist.get_rank() == 0
    content: dict[str, Any] = {
        "schema": "dhp_safe_fa.context_parallel/1",
        "environment": environment("cuda"),
        "ranks": dist.get_world_size(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "speed_case": list(SPEED),
        "bits": [],
        "times": [],
    }
    for key, lines in (
        ("bits", compare(mesh, arguments.repeats)),
        ("times", iter(()) if arguments.no_speed else times(mesh)),
    ):
        for line in lines:
            content[key].append(line)
            if is_first:
                print(json.dumps(line), flush=True)
    if is_first and arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
