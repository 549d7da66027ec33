"""What the cubin's ELF file says of its kernels, against what the compiler was told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dhp_safe_fa.gates import controls
from dhp_safe_fa.gates.sass import elf
from dhp_safe_fa.gates.tools import NotRun

SOURCE = """
extern "C" __global__ void __launch_bounds__(96) bounded(float *out) { out[threadIdx.x] = 1.f; }
extern "C" __global__ void unbounded(float *out) { out[threadIdx.x] = 1.f; }
"""


def test_launch_bounds(tmp_path: Path) -> None:
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    (tmp_path / "k.cu").write_text(SOURCE)
    subprocess.run([nvcc, "-arch=sm_90a", "-cubin", "-o", tmp_path / "k.cubin", tmp_path / "k.cu"], check=True)
    cubin = (tmp_path / "k.cubin").read_bytes()
    assert elf.thread_bounds(cubin) == {"bounded": 96}
    assert set(elf.register_counts(cubin)) == {"bounded", "unbounded"}


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01", b"\x7fELF\x02" + bytes(100)])
def test_what_is_no_cubin(data: bytes) -> None:
    with pytest.raises(NotRun, match="not a cubin"):
        elf.thread_bounds(data)
