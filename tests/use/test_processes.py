"""First calls of a process, threads, and processes that a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import DEVICES, Target, qkv, same_bits

import dhp_safe_fa


@pytest.mark.skipif("cuda" in DEVICES, reason="this checks a machine without a Hopper GPU")
def test_import_opens_no_gpu() -> None:
    """The package loads and serves the CPU where there is no driver at all."""
    code = "import torch, dhp_safe_fa; x = torch.ones(1, 1, 2, 8); print(dhp_safe_fa.attention(x, x, x).sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "16.0"), done.stderr


FIRST_CALL = """
import torch, dhp_safe_fa
x = torch.randn(1, 2, 16, 8)
with {context}:
    dhp_safe_fa.attention(x, x, x)
leaf = x.clone().requires_grad_()
dhp_safe_fa.attention(leaf, x, x).sum().backward()
print(leaf.grad is not None)
"""


@pytest.mark.parametrize(
    "context", ["torch.inference_mode()", "torch.no_grad()", "torch.inference_mode(), torch.enable_grad()"]
)
def test_gradients_are_recorded_whatever_the_first_call_of_a_process_was(context: str) -> None:
    code = FIRST_CALL.format(context=context)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_concurrent_threads(target: Target, rng: torch.Generator) -> None:
    """Eight threads, each with inputs of its own, 25 calls each, while the kernels are loaded by the first."""
    inputs = [qkv(rng, target, 2, 4, 2, 33 + i, 70, 64) for i in range(8)]
    with ThreadPoolExecutor(max_workers=8) as threads:
        results = list(threads.map(lambda t: [dhp_safe_fa.attention(*t, is_causal=True) for _ in range(25)], inputs))
    for tensors, outs in zip(inputs, results, strict=True):
        want = dhp_safe_fa.attention(*tensors, is_causal=True)
        assert all(same_bits(out, want) for out in outs)


# A process that has used all of its threads hands work to a child. torch's threads do not survive a fork, for none of
# its operators: the child has to do with one, as it has in torch's DataLoader.
CHILD = """
import sys, torch, torch.multiprocessing as multiprocessing, dhp_safe_fa

def work(q, k, v, queue):
    torch.set_num_threads(1)
    queue.put(dhp_safe_fa.attention(q, k, v, is_causal=True).cpu().numpy())

if __name__ == "__main__":
    method, device = sys.argv[1:]
    q, k, v = (torch.randn(4, 8, 130, 64, device=device, dtype=torch.float16) for _ in range(3))
    want = dhp_safe_fa.attention(q, k, v, is_causal=True).cpu()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=work, args=(q, k, v, queue), daemon=True)
    child.start()
    got = torch.from_numpy(queue.get(timeout=100))
    child.join()
    print(child.exitcode, torch.equal(got, want))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process(device: str, method: str, tmp_path: Path) -> None:
    if (device, method) == ("cuda", "fork"):
        pytest.skip("CUDA itself does not survive a fork")
    script = tmp_path / "parent.py"
    script.write_text(CHILD)
    root = Path(dhp_safe_fa.__file__).parents[1]
    command = [sys.executable, str(script), method, device]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0 True"), done.stderr
