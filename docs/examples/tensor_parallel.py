"""A small Llama learns to count in several processes, each with a part of the heads:

    torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py

What each ends with, a digest of all parameters, is the same in every run with as many processes.
"""

import hashlib
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import dhp_safe_fa.integrations.transformers  # noqa: F401  (registers attn_implementation="dhp")

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
SECONDS_FOR_THE_GIL = 0.5  # a thread that waits for it needs microseconds; on a machine that is full, a turn


def main() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=8, num_key_value_heads=4, attn_implementation="dhp")  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        parallelize_module(layer, mesh, plan)

    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.arange(4 * 48).reshape(4, 48)
    for step in range(20):
        ids = (text + step) % 64
        loss = model(ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if dist.get_rank() == 0:  # one process prints: lines of several can run into each other
        for rank, hexadecimal in enumerate(digests):
            print(f"rank {rank}: parameters {hexadecimal}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()  # the mesh, and all that refers to it, is gone before its groups are
    # A group that has served a DTensor outlives destroy_process_group (torch 2.13). Its thread needs the GIL to let go
    # of what it gathered last; if Python is ending by then, that aborts the process. It gets it in this sleep.
    time.sleep(SECONDS_FOR_THE_GIL)
    dist.destroy_process_group()
