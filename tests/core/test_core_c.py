"""The C core by itself: compiles csrc/cpu with the system compiler and runs the C programs of tests/core/c.

`CC` names the compiler (default `cc`). Every program prints what it checked; pytest shows it when a test fails.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import needs_kernels

import dhp_safe_fa

ROOT = Path(__file__).resolve().parents[2]
C = ROOT / "tests" / "core" / "c"
CPU = ROOT / "csrc" / "cpu"
FAMILIES = ROOT / "csrc" / "families"
CORE = [*sorted(CPU.rglob("*.c")), ROOT / "csrc" / "error.c"]
# What stands around it in a build without GPU kernels.
HOST = [
    *(ROOT / "csrc" / name for name in ("attention.c", "check.c", "kernel_info.c", "varlen.c")),
    *(ROOT / "csrc" / "cuda" / name for name in ("layout.c", "none.c")),
    *(path for name in ("decode", "fold", "forward", "tiles") for path in sorted((FAMILIES / name).glob("*.c"))),
    C / "no_kernels.c",
]
TESTS = [*sorted(C.rglob("test_*.c")), *HOST]
SHARED = [C / "check.c", C / "reference.c", C / "gradients" / "gradients.c"]

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
# -gdwarf-4: Debian 12's Valgrind does not read Clang's DWARF 5. Contraction: as setup.py says.
FLAGS = ["-std=gnu11", "-gdwarf-4", "-ffp-contract=off", *WARNINGS]
# test_runtime.c looks at the kernel's scratch memory through these two.
WRAPPED = ["-Wl,--wrap=aligned_alloc", "-Wl,--wrap=free"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# GCC for x86 then fuses products and sums as it likes, and takes multiply-adds apart that follow one another, in some
# loops and not in others. GCC 13 does it unasked for some CPUs. The source alone has to give a row the same bits
# whichever loop computes it, hence without the option that forbids contraction.
TAKEN_APART = "--param=avoid-fma-max-bits=512"

VALGRIND = ["valgrind", "--quiet", "--track-origins=no", "--error-exitcode=99"]
VALGRIND_FOUND_ERRORS = 99
PTRACE_NOT_PERMITTED = 77

# Without optimisation a branch of the source is a branch of the program, and with each function compiled once it has
# one pair of counts: functions that must be inlined would have a pair for each place that calls them.
COUNTED = ["-O0", "--coverage", "-Dalways_inline=noinline", "-Wno-attributes", "-Wno-psabi"]
NO_SUCH_KERNEL = 77


COMPILER = shlex.split(os.environ.get("CC", "cc"))


def knows(option: str) -> bool:
    """The compiler takes it."""
    command = [*COMPILER, option, "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compile_c(target: Path, sources: Sequence[Path], *options: str) -> Path:
    """A program, or with `-c` an object."""
    command = [*COMPILER, *FLAGS, *options, *map(str, sources), "-o", str(target)]
    if "-c" not in options:
        command += ["-lm", "-lpthread"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr}"
    return target


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr)
    return result


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Objects of the core and of what the programs share, compiled as they are shipped: -O3."""
    folder = tmp_path_factory.mktemp("core")
    return [compile_c(folder / f"{source.stem}.o", [source], "-O3", "-c") for source in [*SHARED, *CORE]]


def test_values(core: list[Path], tmp_path: Path, session_seed: int) -> None:
    program = compile_c(tmp_path / "test_cpu", [*TESTS, *core], "-O3", *WRAPPED)
    assert run(program, str(session_seed)).returncode == 0


@needs_kernels
def test_workspace_of_the_library(core: list[Path], tmp_path: Path) -> None:
    """Of a build with kernels: its table says how long segments are."""
    library = Path(dhp_safe_fa.__file__).parent / "libdhp_fa.so"
    check = next(one for one in core if one.name == "check.o")
    rpath = f"-Wl,-rpath,{library.parent}"
    program = compile_c(tmp_path / "workspace", [C / "workspace.c", check, library], "-O2", rpath)
    assert run(program).returncode == 0


@pytest.mark.parametrize(
    "options",
    [["-O3", "-ffp-contract=fast", TAKEN_APART], ["-O2", *SANITIZERS]],
    ids=["taken-apart", "sanitized"],
)
def test_values_of_other_builds(tmp_path: Path, session_seed: int, options: list[str]) -> None:
    if TAKEN_APART in options and not knows(TAKEN_APART):
        pytest.skip(f"{COMPILER[0]} does not know {TAKEN_APART}")
    sources = [*TESTS, *SHARED, *CORE]
    program = compile_c(tmp_path / "test_cpu", sources, *options, *WRAPPED)
    assert run(program, str(session_seed)).returncode == 0


@pytest.fixture(scope="module")
def ctgrind(core: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    return compile_c(tmp_path_factory.mktemp("ctgrind") / "ctgrind", [C / "ctgrind.c", *core], "-O3")


def test_no_branch_or_address_depends_on_a_secret(ctgrind: Path) -> None:
    result = run(*VALGRIND, ctgrind)
    assert result.returncode == 0
    assert "runs on secret data" in result.stdout


@pytest.mark.parametrize("leak", ["planted-branch", "planted-index"])
def test_valgrind_reports_a_planted_leak(ctgrind: Path, leak: str) -> None:
    result = run(*VALGRIND, ctgrind, leak)
    assert result.returncode == VALGRIND_FOUND_ERRORS
    assert leak.replace("-", "_") in result.stderr


@pytest.fixture(scope="module")
def steptrace(core: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [C / "steptrace.c", *core]
    # A frame's address in rbp: without it, a loop counter of the parent's may be there while the kernel is traced.
    options = ["-O3", "-fno-omit-frame-pointer", "-Wl,-z,now"]
    program = compile_c(tmp_path_factory.mktemp("steptrace") / "steptrace", sources, *options)
    if run(program, "planted-branch").returncode == PTRACE_NOT_PERMITTED:
        pytest.skip("ptrace is not permitted, or this is not an x86-64 CPU")
    return program


def test_same_instructions_and_registers_on_all_data(steptrace: Path) -> None:
    result = run(steptrace)
    assert result.returncode == 0
    assert "steps" in result.stdout


@pytest.mark.parametrize(
    ("leak", "finding"),
    [("planted-branch", "path differs, registers differ"), ("planted-index", "path equal, registers differ")],
)
def test_steptrace_reports_a_planted_leak(steptrace: Path, leak: str, finding: str) -> None:
    result = run(steptrace, leak)
    assert result.returncode == 1
    assert finding in result.stdout


def gcov() -> str:
    """GCC's tool that reads counts, of the compiler's version where that is in the compiler's name."""
    version = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in version:
        pytest.skip(f"{COMPILER[0]} is not GCC, whose gcov counts what was executed")
    tool = shutil.which(COMPILER[0].replace("gcc", "gcov")) if "gcc" in COMPILER[0] else None
    return tool or "gcov"


def never_executed(program: Path, kernel: str, *arguments: str) -> list[str]:
    """Lines of the kernel's sources that this run of the program leaves out, and branches that go one way alone."""
    for old in program.parent.glob("*.gcda"):
        old.unlink()
    status = run(program, kernel, *arguments).returncode
    if status == NO_SUCH_KERNEL:
        pytest.skip(f"this CPU does not run the kernel {kernel}")
    assert status == 0
    counts = str(next(program.parent.glob(f"*tile_{kernel}.gcda")))
    command = [gcov(), "--json-format", "--branch-probabilities", "--stdout", counts]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    sources = [file for file in report["files"] if Path(file["file"]).resolve().is_relative_to(ROOT / "csrc")]
    names = {Path(file["file"]).name for file in sources}
    tiles = {f"tile_{part}.h" for part in ("impl", "few", "scores", "segments", "values", "gradients", "sinks")}
    assert tiles <= names
    return [
        f"{Path(file['file']).name}:{line['line_number']} ({line['function_name']})"
        for file in sources
        for line in file["lines"]
        if line["count"] == 0 or any(branch["count"] == 0 for branch in line["branches"])
    ]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that counts; its counts lie beside it."""
    gcov()
    program = tmp_path_factory.mktemp("counted") / "secrecy_coverage"
    return compile_c(program, [C / "secrecy_coverage.c", *SHARED, *CORE], *COUNTED)


@pytest.mark.parametrize("kernel", ["avx512", "avx2", "baseline"])
def test_cases_of_secrecy_execute_the_whole_kernel(counted: Path, kernel: str) -> None:
    """Code that no case executes would pass both tests of secrecy unseen."""
    assert never_executed(counted, kernel) == []
    left_out = never_executed(counted, kernel, "first")
    assert any(line.startswith("tile_values.h") for line in left_out), "one case alone cannot execute everything"
