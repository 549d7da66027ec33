"""python -m dhp_safe_fa: what was built, what this machine can run, and whether the evidence is about this build.
--verify: whether what is installed is what was built (verify.py)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from dhp_safe_fa import __version__, _inspect, verify
from dhp_safe_fa._exit import exit_code
from dhp_safe_fa._operator.schema import CPU_MAX_HEAD_DIM
from dhp_safe_fa._sdpa import unsupported_gpu


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees: name, compute capability, and why the kernels do not run there (None if they do)."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append({"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "why_not": unsupported_gpu(index)})
    return found


def report() -> dict[str, Any]:
    """Everything that is printed, as plain values."""
    from dhp_safe_fa import evidence

    return {
        "version": __version__,
        "package": str(Path(__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": _inspect.build_info(),
        "kernels": _inspect.kernels(),
        "cpu": {"machine": platform.machine(), "threads": torch.get_num_threads(), "max_head_dim": CPU_MAX_HEAD_DIM},
        "gpus": gpus(),
        "evidence": evidence.status().line().removeprefix("stored evidence: "),
        "transformers": importlib.util.find_spec("transformers") is not None,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report for a person."""
    build, kernels, cpu = found["build"], found["kernels"], found["cpu"]
    out = [
        f"dhp_safe_fa {found['version']} in {found['package']}",
        f"  python {found['python']}, torch {found['torch']}, host code compiled by {build['compiler']}",
        "built",
        f"  CPU kernel: float32, float64, float16, bfloat16, head_dim 1 to {cpu['max_head_dim']}",
    ]
    if kernels:
        out.append(
            f"  {len(kernels)} GPU kernels (nvcc {build['cuda']}): float16, bfloat16, "
            f"head_dim in multiples of 8 up to {build['max_head_dim_cuda']}"
        )
        out += [f"    {kernel['name']}  sha256 {kernel['cubin_sha256'][:16]}" for kernel in kernels]
    else:
        sought = "in CUDA_HOME if that was set, else PATH, /usr/local/cuda"
        out.append(f"  no GPU kernels: nvcc was not found when this was built ({sought})")
    out += ["this machine", f"  {cpu['machine']}, {cpu['threads']} threads: runs the CPU kernel"]
    for index, gpu in enumerate(found["gpus"]):
        verdict = "runs the GPU kernels" if gpu["why_not"] is None else f"not used: {gpu['why_not']}"
        out.append(f"  cuda:{index} {gpu['name']} (compute capability {gpu['capability']}): {verdict}")
    if not found["gpus"]:
        out.append("  torch sees no GPU")
    transformers = "installed" if found["transformers"] else "not installed"
    out += ["evidence", f"  {found['evidence']}", f"transformers: {transformers}"]
    return out


def verified(package: Path) -> list[verify.Check]:
    """What is compared without loading anything, and then what this process has loaded."""
    from dhp_safe_fa.gates import provenance

    sources = provenance.built_and_here()
    cubins = {str(kernel["name"]): _inspect.cubin(kernel["name"]) for kernel in _inspect.kernels()}
    return [*verify.files(package), *verify.loaded(package, cubins, str(sources["built"]), sources["here"])]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dhp_safe_fa", description="What was built, what this machine can run, and what was shown of it."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--verify", action="store_true", help="hash what is installed again: is it what was built? exit code 0 or 1"
    )
    found_options = parser.parse_args(arguments)
    if found_options.verify:
        package = Path(__file__).resolve().parent
        return verify.show(verified(package), package, found_options.json)
    found = report()
    print(json.dumps(found, indent=2) if found_options.json else "\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
