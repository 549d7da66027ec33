"""On what a run was made: everything a reader needs to repeat it, and nothing about whose machine it is."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import dhp_safe_fa
from dhp_safe_fa import _inspect
from dhp_safe_fa._sdpa import HOPPER

# nvidia-smi's names for what is recorded of a GPU.
GPU_QUERY = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem", "clocks.sm", "temperature.gpu")


def environment(device: str) -> dict[str, Any]:
    """Versions, commit, date, shipped kernels, and the GPU or the CPU. What cannot be found out is None."""
    build = _inspect.build_info()
    common = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dhp_safe_fa": dhp_safe_fa.__version__,
        **git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvcc": build["cuda"],
        "compiler": build["compiler"],
        "kernels": {kernel["name"]: kernel["cubin_sha256"] for kernel in _inspect.kernels()},
    }
    return common | (_gpu() if device == "cuda" else _cpu())


def missing_hopper() -> str | None:
    """Why kernels cannot be timed on the current CUDA device, or None."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability() != HOPPER:
        return f"{torch.cuda.get_device_name()} is not a Hopper GPU (compute capability 9.0)"
    return None


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties()
    fields = ",".join(GPU_QUERY)
    answer = _output("nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={fields}", "--format=csv,noheader")
    values = answer.split(", ") if answer else [None] * len(GPU_QUERY)
    return {
        "device": properties.name,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "nvidia_smi": dict(zip(GPU_QUERY, values, strict=False)),
    }


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": models[0] if models else platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def git_commit(*paths: str) -> dict[str, Any]:
    """The commit of the checkout that the package is used from; dirty if tracked files (at these paths) differ from it.

    A copy without history takes the commit from the environment variable DHP_SAFE_FA_COMMIT, and cannot say if it is
    dirty.
    """
    root = str(Path(__file__).resolve().parents[2])
    commit = _output("git", "-C", root, "rev-parse", "--verify", "HEAD") if (Path(root) / ".git").exists() else None
    if commit is None:
        return {"commit": os.environ.get("DHP_SAFE_FA_COMMIT"), "dirty": None}
    changes = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
