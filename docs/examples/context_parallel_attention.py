"""Attention and its gradients over ranks, compared with one process, bit by bit.

torchrun --nproc-per-node 2 docs/examples/context_parallel_attention.py
"""

import os

import torch
import torch.distributed as dist

import dhp_safe_fa
from dhp_safe_fa.integrations.context_parallel import ContextParallel

LENGTH = 1000  # rows in all; no number of ranks has to divide it
CAUSAL = {"is_causal": True}


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")

    # Made whole on every rank here, for the comparison. A model makes its local rows alone.
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, LENGTH, 64, generator=rng).to(device, torch.bfloat16)  # [B, Hq, S, D]
    k, v = torch.randn(2, 1, 2, LENGTH, 64, generator=rng).to(device, torch.bfloat16)  # [B, Hk, S, D]

    parallel = ContextParallel(balanced=True, heads_at_once=1)
    mine = [parallel.shard(t, dim=2).requires_grad_() for t in (q, k, v)]
    out, lse = parallel.attention_lse(*mine, **CAUSAL)
    (out.sum() + lse.sum()).backward()  # the loss is the sum over all ranks

    whole = [t.requires_grad_() for t in (q, k, v)]
    one_process, its_lse = dhp_safe_fa.attention_lse(*whole, **CAUSAL)
    (one_process.sum() + its_lse.sum()).backward()
    assert torch.equal(parallel.unshard(out, dim=2), one_process)
    assert torch.equal(parallel.unshard(lse, dim=2), its_lse)
    for here, there in zip(mine, whole, strict=True):
        assert torch.equal(parallel.unshard(here.grad, dim=2), there.grad)
    text = f"rank {dist.get_rank()}: rows {mine[0].shape[2]} of {LENGTH}, the bits of one process"
    print(f"{text}\n", end="", flush=True)  # in one piece: lines of several processes can run into each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
