"""Builds three libraries into the package: host core (C), torch shim (C++), inspection module (pybind11).

    libdhp_fa.so      csrc/*.c, csrc/cpu, csrc/cuda, with every cubin embedded; C ABI in csrc/dhp_fa.h
    libdhp_torch.so   csrc/torch/ops.cpp; LibTorch stable ABI, no Python in it
    _inspect*.so      csrc/python/inspect.cpp

Needs a C and a C++ compiler and torch >= 2.10 (its headers). With nvcc the GPU kernels are built too; without it the
package is CPU-only and says so.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc" / "kernels"))
import build as kernels  # noqa: E402  (csrc/kernels/build.py)

VERSION = re.findall(r'"(.+)"', (ROOT / "dhp_safe_fa" / "_version.py").read_text())[-1]
TORCH_2_10 = "0x020a000000000000"  # oldest torch whose stable ABI we use: major, minor, patch in the top bytes
C_FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow", "-Werror"]


def torch_paths() -> tuple[list[str], list[str]]:
    """torch's include and library folders; in an isolated build, those of the environment that is installed into."""
    if importlib.util.find_spec("torch") is None:
        sys.path += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        importlib.invalidate_caches()
    try:
        from torch.utils import cpp_extension
    except ImportError:
        raise SystemExit(
            "dhp_safe_fa needs torch >= 2.10 in this environment before it is built: pip install 'torch>=2.10'"
        ) from None
    return cpp_extension.include_paths(), cpp_extension.library_paths()


def pybind11_include() -> list[str]:
    """pybind11's own headers, or those that torch carries (already among torch's include folders)."""
    if importlib.util.find_spec("pybind11") is None:
        return []
    import pybind11

    return [pybind11.get_include()]


class Build(build_ext):
    """Cubins first, then the three libraries in order; each links the first by a path relative to itself."""

    def run(self) -> None:
        try:
            table, nvcc = kernels.build(ROOT / "build"), kernels.find_nvcc()
        except kernels.BuildError as error:
            raise SystemExit(str(error)) from error
        if nvcc is None:
            print("dhp_safe_fa: nvcc was not found (CUDA_HOME, then PATH): building CPU-only", file=sys.stderr)
        core = self.extensions[0]
        core.sources.append(str(table.relative_to(ROOT)))
        if nvcc is None:
            core.sources.append("csrc/cuda/launch_none.c")
        else:
            core.sources += ["csrc/cuda/driver.c", "csrc/cuda/launch.c"]
            core.include_dirs.append(str(kernels.toolkit_root(nvcc) / "include"))
        version = kernels.nvcc_version(nvcc) if nvcc else ""
        self.extensions[2].define_macros.append(("DHP_NVCC_VERSION", f'"{version}"'))

        include, library = torch_paths()
        shim = self.extensions[1]
        system = [f"-isystem{folder}" for folder in pybind11_include() + include]  # their warnings are not ours
        shim.extra_compile_args += system
        shim.library_dirs += library
        self.extensions[2].extra_compile_args += system
        super().run()

    def build_extension(self, extension: Extension) -> None:
        extension.library_dirs.append(str(Path(self.get_ext_fullpath(extension.name)).parent))
        super().build_extension(extension)

    def get_ext_filename(self, name: str) -> str:
        parts = name.split(".")  # setuptools asks for the dotted name and for its last part alone
        if parts[-1].startswith("lib"):
            return str(Path(*parts).with_suffix(".so"))
        return str(build_ext.get_ext_filename(self, name))


HEADERS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.h"))]

setup(
    version=VERSION,
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            "dhp_safe_fa.libdhp_fa",
            sources=[
                "csrc/attention.c",
                "csrc/error.c",
                "csrc/plan.c",
                "csrc/cuda/layout.c",
                *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / "cpu").glob("*.c"))),
            ],
            depends=HEADERS,
            include_dirs=["csrc"],
            extra_compile_args=["-std=gnu11", *C_FLAGS],
            extra_link_args=["-ldl", "-lpthread", "-lm"],
        ),
        Extension(
            "dhp_safe_fa.libdhp_torch",
            sources=["csrc/torch/ops.cpp"],
            depends=HEADERS,
            language="c++",
            define_macros=[("TORCH_TARGET_VERSION", TORCH_2_10)],
            libraries=["dhp_fa", "torch", "torch_cpu", "c10"],
            extra_compile_args=["-std=c++17", *C_FLAGS],
            # torch is kept among the needed libraries even if no symbol of it is used directly: in a CUDA build it
            # leads to libtorch_cuda, where the weak stream function of ops.cpp lives
            extra_link_args=["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"],
        ),
        Extension(
            "dhp_safe_fa._inspect",
            sources=["csrc/python/inspect.cpp"],
            depends=HEADERS,
            language="c++",
            define_macros=[("DHP_VERSION", f'"{VERSION}"')],
            libraries=["dhp_fa"],
            extra_compile_args=["-std=c++17", *C_FLAGS],
            extra_link_args=["-Wl,-rpath,$ORIGIN"],
        ),
    ],
)
