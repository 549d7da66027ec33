"""A small language model, which knows nothing of ranks, trained on sequences that lie spread over them.

torchrun --nproc-per-node 2 docs/examples/context_parallel_training.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dhp_safe_fa.integrations.context_parallel import ContextParallel

TOKENS, WIDTH, HEADS, LENGTH, STEPS = 64, 64, 4, 200, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(self.between(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens) + self.position(positions)))


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")

    torch.manual_seed(0)  # the same parameters on every rank
    model = Model().to(device, torch.bfloat16 if on_gpus else torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.arange(LENGTH + 1, device=device)[None] % TOKENS  # counting, which can be learned

    parallel = ContextParallel(balanced=True)
    tokens, labels = (parallel.shard(t, dim=1) for t in (text[:, :-1], text[:, 1:]))
    positions = parallel.positions(LENGTH, device)
    losses = []
    for _ in range(STEPS):
        with parallel.policy():  # the backward pass, too: a checkpoint would call attention again
            logits = model(tokens, positions)
            # This rank's part of the mean over all rows.
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH
            optimiser.zero_grad()
            loss.backward()
        for parameter in model.parameters():  # which every rank has seen in its rows alone
            dist.all_reduce(parameter.grad)
        optimiser.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item())
    text = f"rank {dist.get_rank()}: loss {losses[0]:.2f}, after {STEPS} steps {losses[-1]:.2f}"
    print(f"{text}\n", end="", flush=True)  # in one piece: lines of several processes can run into each other
    assert losses[-1] < losses[0] / 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
