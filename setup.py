"""Builds three libraries into the package: host core (C), torch shim (C++), inspection module (pybind11).

    libdhp_fa.so      csrc/*.c, csrc/cpu, csrc/cuda, with every cubin embedded; C ABI in csrc/dhp_fa.h
    libdhp_torch.so   csrc/torch; LibTorch stable ABI, no Python in it
    _inspect*.so      csrc/python/inspect.cpp

Needs a C and a C++ compiler and torch >= 2.10 (its headers). With nvcc the GPU kernels are built too; without it the
package is CPU-only and says so. A wheel also carries what a checkout has beside the package: the planted leaks of the
gate, compiled, and the policy and evidence of audits/. What a build says of itself is build_record.py's.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc" / "kernels")]
import build_cubins as kernels  # noqa: E402
import build_record  # noqa: E402
from build_backend import REQUIREMENT, find_torch  # noqa: E402

VERSION = re.findall(r'"(.+)"', (ROOT / "dhp_safe_fa" / "_version.py").read_text())[-1]
TORCH_2_10 = "0x020a000000000000"  # oldest torch whose stable ABI we use: major, minor, patch in the top bytes
# Without contraction: the source says what is fused, or a row's bits would be the compiler's choice (csrc/ct.h).
C_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow", "-Werror"]


def pybind11_include() -> list[str]:
    """pybind11's own headers, or those that torch carries (already among torch's include folders)."""
    if importlib.util.find_spec("pybind11") is None:
        return []
    import pybind11

    return [pybind11.get_include()]


def gates_module(name: str) -> Any:
    """dhp_safe_fa.gates.NAME, without the package around it, which cannot be imported before it is built."""
    package = types.ModuleType("dhp_safe_fa")
    package.__path__ = [str(ROOT / "dhp_safe_fa")]
    sys.modules.setdefault("dhp_safe_fa", package)
    return importlib.import_module(f"dhp_safe_fa.gates.{name}")


class BuildPython(build_py):
    """Starts from an empty folder: what an older build left there would otherwise be packed into the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "dhp_safe_fa", ignore_errors=True)
        super().run()


class Build(build_ext):
    """Cubins first, then the three libraries in order; each links the first by a path relative to itself."""

    def run(self) -> None:
        try:
            table, nvcc = kernels.build(ROOT / "build"), kernels.find_nvcc()
        except kernels.BuildError as error:
            raise SystemExit(str(error)) from error
        torch = find_torch()
        if torch is None:
            raise SystemExit(f"dhp_safe_fa needs {REQUIREMENT} in this environment before it is built: "
                             f"pip install '{REQUIREMENT}'")
        if nvcc is None:
            sought = kernels.where_nvcc_is_sought()
            print(f"dhp_safe_fa: nvcc was not found ({sought}): building CPU-only", file=sys.stderr)
        core = self.extensions[0]
        core.sources.append(str(table.relative_to(ROOT)))
        if nvcc is None:
            core.sources.append("csrc/cuda/none.c")
        else:
            core.sources += [f"csrc/cuda/{name}.c" for name in ("driver", "session", "tensor_map")]
            core.include_dirs.append(str(kernels.toolkit_root(nvcc) / "include"))
        version = kernels.nvcc_version(nvcc) if nvcc else ""
        self.extensions[2].define_macros.append(("DHP_NVCC_VERSION", f'"{version}"'))
        sources = self.bind_sources()

        shim = self.extensions[1]
        include = [*pybind11_include(), str(torch / "include")]
        # As system headers: their warnings are not ours. The map keeps this machine's paths out of the libraries.
        flags = [*(f"-isystem{folder}" for folder in include), f"-ffile-prefix-map={torch}=torch"]
        shim.extra_compile_args += flags
        shim.library_dirs.append(str(torch / "lib"))
        self.extensions[2].extra_compile_args += flags
        super().run()
        if not self.inplace:
            self.pack_audits(Path(self.build_lib) / "dhp_safe_fa", has_kernels=nvcc is not None)
        tools = {
            "nvcc": version or None,
            "cc": build_record.compiler(self.compiler.compiler_so[0]),
            "c++": build_record.compiler(self.compiler.compiler_so_cxx[0]),
            "python": platform.python_version(),
            "setuptools": setuptools.__version__,
            "torch": build_record.torch_version(torch),
            "pybind11": build_record.pybind11_version(include),
        }
        self.write_provenance(sources, tools, has_kernels=nvcc is not None)

    def write_provenance(self, sources: dict[str, Any], tools: dict[str, str | None], has_kernels: bool) -> None:
        """Into the package of a wheel; of a build in place, into build/ (dhp_safe_fa/verify.py)."""
        package = ROOT / "dhp_safe_fa" if self.inplace else Path(self.build_lib) / "dhp_safe_fa"
        libraries = [package / Path(self.get_ext_filename(each.name)).name for each in self.extensions]
        cubins = (ROOT / "build" / "cubins").glob("*.cubin") if has_kernels else ()
        evidence = ROOT / "audits" / "evidence.json"
        written = build_record.provenance(ROOT, VERSION, libraries, cubins, evidence, sources, tools)
        build_record.write(written, (ROOT / "build" if self.inplace else package) / build_record.PROVENANCE)

    def bind_sources(self) -> dict[str, Any]:
        """The build says what it was made of. All libraries are made anew whenever that changes, by their contents and
        not by their files' times, or the one that says it would speak for others."""
        sources = gates_module("provenance").of_sources(ROOT)
        written = ROOT / "build" / "sources.json"
        text = json.dumps(sources) + "\n"
        if not written.exists() or written.read_text() != text:
            written.write_text(text)
        for extension in self.extensions:
            extension.depends.append(str(written.relative_to(ROOT)))
        literal = json.dumps(json.dumps(sources))  # JSON in a C string: its escapes are C's
        self.extensions[2].define_macros.append(("DHP_SOURCES", literal))
        return dict(sources)

    def pack_audits(self, package: Path, has_kernels: bool) -> None:
        """What a checkout reads from audits/ and tests/controls/ goes into the package."""
        for name, folder in (("evidence.json", package / "audits"), ("sass_policy.json", package / "gates")):
            if (ROOT / "audits" / name).exists():
                folder.mkdir(exist_ok=True)
                shutil.copy2(ROOT / "audits" / name, folder)
        if has_kernels:
            controls = gates_module("controls")
            controls.build_controls(controls.CACHE)
            planted = package / controls.PACKAGED.relative_to(ROOT / "dhp_safe_fa")
            planted.mkdir(parents=True, exist_ok=True)
            manifest = controls.CACHE / controls.MANIFEST
            for name in [manifest.name, *json.loads(manifest.read_text())["cubins"]]:
                shutil.copy2(controls.CACHE / name, planted)

    def build_extensions(self) -> None:
        for linker in ("linker_so", "linker_so_cxx"):  # some interpreters put a path into their own installation there
            command = getattr(self.compiler, linker, [])
            setattr(self.compiler, linker, [part for part in command if not part.startswith("-Wl,-rpath")])
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        extension.library_dirs.append(str(Path(self.get_ext_fullpath(extension.name)).parent))
        super().build_extension(extension)

    def get_ext_filename(self, name: str) -> str:
        parts = name.split(".")  # setuptools asks for the dotted name and for its last part alone
        if parts[-1].startswith("lib"):
            return str(Path(*parts).with_suffix(".so"))
        return str(build_ext.get_ext_filename(self, name))


COMMANDS: dict[str, Any] = {"build_ext": Build, "build_py": BuildPython}

if importlib.util.find_spec("setuptools.command.bdist_wheel"):  # a build in place does without, by an older setuptools
    from setuptools.command.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        """Lists the wheel's components in .dist-info/sboms. An editable wheel is written before there are any."""

        def write_wheelfile(self, wheelfile_base: str, *generator: str) -> None:
            super().write_wheelfile(wheelfile_base, *generator)
            built = Path(str(self.bdist_dir)) / "dhp_safe_fa" / build_record.PROVENANCE
            if built.is_file():
                requires: list[str] = getattr(self.distribution, "install_requires", [])
                folder = Path(wheelfile_base) / "sboms"
                folder.mkdir()
                components = build_record.sbom(json.loads(built.read_text()), requires)
                build_record.write(components, folder / build_record.SBOM)

    COMMANDS["bdist_wheel"] = Wheel


# What else an extension is built anew for: its flags are in this file.
DEPENDS = ["setup.py", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.h")))]

setup(
    version=VERSION,
    cmdclass=COMMANDS,
    ext_modules=[
        Extension(
            "dhp_safe_fa.libdhp_fa",
            sources=[
                "csrc/cuda/layout.c",
                *(
                    str(path.relative_to(ROOT))
                    for pattern in ("*.c", "cpu/*.c", "cpu/*/*.c", "families/*/*.c")
                    for path in sorted((ROOT / "csrc").glob(pattern))
                ),
            ],
            depends=DEPENDS,
            include_dirs=["csrc"],
            extra_compile_args=["-std=gnu11", *C_FLAGS],
            extra_link_args=["-ldl", "-lpthread", "-lm"],
        ),
        Extension(
            "dhp_safe_fa.libdhp_torch",
            sources=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / "torch").glob("*.cpp"))],
            depends=DEPENDS,
            language="c++",
            define_macros=[("TORCH_TARGET_VERSION", TORCH_2_10)],
            extra_compile_args=["-std=c++17", *C_FLAGS],
            # libtorch is kept among the needed libraries although no symbol of it is used: where torch has CUDA, it
            # leads to libtorch_cuda, where the weak stream function of running.cpp lives. Not in `libraries`, which
            # come before these options: a wheel linked against a CPU-only torch would then find no stream elsewhere.
            extra_link_args=["-Wl,--no-as-needed", "-ldhp_fa", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,-rpath,$ORIGIN"],
        ),
        Extension(
            "dhp_safe_fa._inspect",
            sources=["csrc/python/inspect.cpp"],
            depends=DEPENDS,
            language="c++",
            define_macros=[("DHP_VERSION", f'"{VERSION}"')],
            libraries=["dhp_fa"],
            extra_compile_args=["-std=c++17", *C_FLAGS],
            extra_link_args=["-Wl,-rpath,$ORIGIN"],
        ),
    ],
)
