"""Build the shipped cubins and the C table that embeds them.

    python csrc/kernels/build_cubins.py [--out build] [--jobs N]

One cubin per kernel of each family (csrc/families) under <out>/cubins/, its intermediate files under <out>/kernels/,
and <out>/kernels/kernel_table.c, which the host core links. Steps per kernel: wgmma.h is generated, nvcc makes PTX,
unbranch.py removes the conditional branches, ptxas makes sm_90a machine code with every warning an error. Spills or a
stack frame stop the build.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from families import Family, Kernel, families  # noqa: E402
from unbranch import unbranch  # noqa: E402

DEVICE = (".cu", ".cuh", ".h", ".py")  # endings of what can change machine code; the host's C cannot


def inputs_of(family: Family) -> list[Path]:
    """What the machine code of a family is made of."""
    folders = (HERE, HERE.parent / "hopper", family.folder)
    found = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in DEVICE]
    return [HERE.parent / "ct.h", *found]


@dataclass(frozen=True)
class Cubin:
    """What came out of building one kernel."""

    family: Family
    kernel: Kernel
    path: Path
    sha256: str
    registers: int
    spill_bytes: int


class BuildError(Exception):
    """One sentence that says which step of which kernel failed."""


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME if that is set, else of PATH, else of /usr/local/cuda; None without one."""
    home = os.environ.get("CUDA_HOME")
    if home:
        candidate = Path(home) / "bin" / "nvcc"
        return candidate if candidate.exists() else None
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    default = Path("/usr/local/cuda/bin/nvcc")
    return default if default.exists() else None


def where_nvcc_is_sought() -> str:
    """In words, what find_nvcc has looked at."""
    home = os.environ.get("CUDA_HOME")
    return f"CUDA_HOME ({home}), and nothing else is looked at while that is set" if home else "PATH, /usr/local/cuda"


def toolkit_root(nvcc: Path) -> Path:
    """The toolkit that this nvcc, which may be a wrapper somewhere on PATH, belongs to: nvcc itself says so."""
    text = run([nvcc, "--dryrun", "-x", "cu", os.devnull], "nvcc --dryrun")
    match = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
    if not match:
        raise BuildError("nvcc --dryrun did not name the toolkit's folder (no line `#$ TOP=`)")
    return Path(match[1].strip()).resolve()


def nvcc_version(nvcc: Path) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


def run(command: list[str | Path], what: str) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{what} failed:\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def digest_of_inputs(family: Family, kernel: Kernel, nvcc: Path) -> str:
    """Changes when the machine code could: sources, constants, compiler."""
    digest = hashlib.sha256(f"{kernel} {nvcc_version(nvcc)}".encode())
    for path in inputs_of(family):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernel(family: Family, kernel: Kernel, nvcc: Path, out: Path) -> Cubin:
    """Build one cubin, or take the one that is there if none of its inputs changed."""
    work = out / "kernels" / kernel.name
    cubin = out / "cubins" / f"{kernel.name}.cubin"
    log, stamp = work / "ptxas.log", work / "inputs.sha256"
    wanted = digest_of_inputs(family, kernel, nvcc)
    if not (cubin.exists() and log.exists() and stamp.exists() and stamp.read_text() == wanted):
        work.mkdir(parents=True, exist_ok=True)
        cubin.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        (work / "wgmma.h").write_text(family.products(kernel))
        run(
            [nvcc, "-ptx", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=compute_90a",
             "-Werror=all-warnings", f"-I{work}", *(f"-D{k}={v}" for k, v in kernel.macros.items()),
             "-o", work / "kernel.ptx", family.folder / (kernel.source or family.source)],
            f"{kernel.name}: nvcc",
        )
        try:
            text, _ = unbranch((work / "kernel.ptx").read_text())
        except ValueError as error:
            raise BuildError(f"{kernel.name}: branch removal: {error}") from error
        (work / "unbranched.ptx").write_text(text)
        ptxas = toolkit_root(nvcc) / "bin" / "ptxas"
        # no line information: it would put PTX text and this machine's paths into the shipped file
        report = run(
            [ptxas, "-arch=sm_90a", "-O3", "-v", "--warning-as-error", "-o", cubin, work / "unbranched.ptx"],
            f"{kernel.name}: ptxas",
        )
        log.write_text(report)
        stamp.write_text(wanted)
    report = log.read_text()
    registers = re.search(r"Used (\d+) registers", report)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if "serialized" in report:  # an information to ptxas; it halves the speed
        raise BuildError(f"{kernel.name}: ptxas runs the matrix products one by one:\n{report}")
    if not registers or not memory:
        raise BuildError(f"{kernel.name}: ptxas did not report registers and spills:\n{report}")
    if any(int(memory[i]) for i in (1, 2, 3)):
        raise BuildError(f"{kernel.name}: {memory[0]}; a shipped kernel keeps everything in registers")
    sha256 = hashlib.sha256(cubin.read_bytes()).hexdigest()
    return Cubin(family, kernel, cubin, sha256, int(registers[1]), int(memory[2]))


def table_source(cubins: list[Cubin], found: list[Family]) -> str:
    """kernel_table.c: each cubin as bytes (.incbin), one row of constants for each, and each family's part of them."""
    lines = ["/* Written by csrc/kernels/build_cubins.py. */", '#include "kernels/kernel_table.h"', ""]
    lines += [f'#include "families/{family.name}/{family.params}"' for family in found]
    lines.append("")
    for index, cubin in enumerate(cubins):
        symbol = f"dhp_cubin_{index}"
        lines += [
            f'__asm__(".section .rodata\\n.balign 64\\n{symbol}: .incbin \\"{cubin.path.resolve()}\\"\\n'
            f'{symbol}_end: .byte 0\\n.text\\n");',
            f"extern const unsigned char {symbol}[] __attribute__((visibility(\"hidden\")));",
        ]
    lines += ["", "const dhp_kernel_info dhp_kernel_table[] = {"]
    for index, cubin in enumerate(cubins):
        k = cubin.kernel
        shared = (k.head_dim, k.tile_k, k.warpgroups, k.rows, k.stages, *dict(k.extra).values())
        lines += [
            f"  {{.name = \"{k.name}\", .family = \"{cubin.family.name}\", .entry = \"{cubin.family.entry}\",",
            f"   .part = \"{k.part}\", .cubin_sha256 = \"{cubin.sha256}\", .cubin = dhp_cubin_{index},",
            f"   .cubin_size = {cubin.path.stat().st_size}, .dtype = DHP_{k.dtype.upper()}, .head_dim = {k.head_dim},",
            f"   .warpgroups = {k.warpgroups}, .rows = {k.rows}, .tile_q = {k.tile_q},",
            f"   .tile_k = {k.tile_k}, .stages = {k.stages}, .ctas_per_sm = {k.ctas_per_sm},",
            f"   .step_cycles = {k.step_cycles}, .segment_tiles = {k.segment_tiles}, .is_short = {int(k.is_short)},",
            f"   .cluster = {k.cluster}, .unit_cycles = {k.unit_cycles},",
            f"   .threads = {k.warpgroups} * DHP_WARPGROUP_THREADS,",
            f"   .shared_bytes = {cubin.family.shared_bytes}({', '.join(map(str, shared))}),",
            f"   .registers = {cubin.registers}, .spill_bytes = {cubin.spill_bytes}}},",
        ]
    if not cubins:
        lines.append("  {0} /* C wants one element; the size below says there is none */")
    lines += ["};", f"const int dhp_kernel_table_size = {len(cubins)};"]
    first = 0
    for family in found:
        count = sum(cubin.family is family for cubin in cubins)
        lines.append(f"const dhp_family dhp_family_{family.name} = {{dhp_kernel_table + {first}, {count}}};")
        first += count
    return "\n".join([*lines, ""])


def build(out: Path, jobs: int | None = None) -> Path:
    """Build everything under `out` and return the path of kernel_table.c, whose table is empty if there is no nvcc.
    BuildError says what failed."""
    nvcc = find_nvcc()
    found = families()
    cubins: list[Cubin] = []
    if nvcc:
        wanted = [(family, kernel) for family in found for kernel in family.kernels]
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            cubins = list(pool.map(lambda pair: compile_kernel(pair[0], pair[1], nvcc, out), wanted))
    shipped = {cubin.path for cubin in cubins}
    for old in (out / "cubins").glob("*.cubin"):
        if old not in shipped:
            old.unlink()
    table = out / "kernels" / "kernel_table.c"
    table.parent.mkdir(parents=True, exist_ok=True)
    source = table_source(cubins, found)
    if not table.exists() or table.read_text() != source:  # an unchanged table leaves the host core up to date
        table.write_text(source)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build"), help="where build products go (default: build)")
    parser.add_argument("--jobs", type=int, help="kernels compiled at a time (default: one a core)")
    arguments = parser.parse_args()
    try:
        build(arguments.out, arguments.jobs)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    nvcc = find_nvcc()
    if nvcc is None:
        print(f"nvcc was not found ({where_nvcc_is_sought()}): no kernels built, the package will be CPU-only")
    else:
        count = sum(len(family.kernels) for family in families())
        print(f"{count} cubins under {arguments.out / 'cubins'} (nvcc {nvcc_version(nvcc)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
