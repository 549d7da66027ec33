"""Planted leaks: small kernels that prove, in every run, that the gates can fail.

Each source in tests/controls/ holds two kernels. `leak` has one planted leak, which a gate has to find *as the first
line declares*; `clean` does the same work without it and has to pass every gate. The first line reads

    // control: expects sass=KIND counters=SEEN bitwise=SEEN timing=SEEN [build=unbranch|relocatable] [public=BYTES]

KIND is a kind of finding, `literal` (only the count of predicated transfers sees it), or `blind` (another gate's case:
here there must be no finding). SEEN, of the gates that execute the kernels, is `caught`, `blind` (and it is as wrong to
see something there as to miss a leak) or `may` (chance decides, nothing is claimed). Every gate of registry.py has to
be named: a leak whose line is silent about a gate would be judged there by a rule that nobody wrote down.
build=unbranch sends the code through the branch-removal step of the shipped kernels. public: its pointer parameter so
many bytes from the first one points to memory that is declared public.

Machine code comes from nvcc, all sources in one cubin per way of building (starting nvdisasm is what takes time),
where the kernels are called NAME_leak and NAME_clean. It is kept under build/controls/ until anything that goes into it
changes; a package without sources takes what `build_controls` left in planted/ beside this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import provenance, tools
from .registry import EXECUTING
from .sass.gate import Cubin, KernelReport, audit
from .sass.policy import Policy, PublicMemory
from .verdict import BLIND as BLIND
from .verdict import MAY as MAY
from .verdict import PASS, ControlOutcome

SOURCES, UNBRANCH = provenance.CONTROLS, provenance.UNBRANCH
PACKAGED, MANIFEST = provenance.PACKAGED, provenance.MANIFEST
CACHE = provenance.ROOT / "build" / "controls"
LITERAL, CAUGHT = "literal", "caught"
LEAK, CLEAN = TWINS = ("leak", "clean")
_FLAGS = ["-std=c++17", "-O3", "-lineinfo"]
_ARCHITECTURE = "90a"
_SEEN = " ".join(f"{gate}=SEEN" for gate in EXECUTING)
_FORM = f"// control: expects sass=KIND {_SEEN} [build=unbranch|relocatable] [public=BYTES]"
_HEADER = re.compile(
    r"// control: expects sass=(?P<sass>[\w-]+)"
    + "".join(rf" {gate}=(?P<{gate}>{CAUGHT}|{BLIND}|{MAY})" for gate in EXECUTING)
    + r"(?: build=(?P<build>unbranch|relocatable))?(?: public=(?P<public>\d+))?"
)


@dataclass(frozen=True)
class Header:
    """What a control's first line says: what the gate sass finds, what each other gate sees, how it is built."""

    sass: str
    executing: dict[str, str]
    build: str
    public: int | None


@dataclass(frozen=True)
class Controls:
    """All controls, and the cubins that hold their kernels.

    Attributes:
        expects: name to what the gate sass finds.
        executing: name to {gate: caught, blind or may} for the gates that execute the kernels.
        public: name to the place of a pointer parameter to public memory, of those that have one.
    """

    expects: dict[str, str]
    cubins: list[bytes]
    executing: dict[str, dict[str, str]] = field(default_factory=dict)
    public: dict[str, int] = field(default_factory=dict)

    def expected_of(self, gate: str) -> dict[str, str]:
        """Name to caught, blind or may, for one gate that executes the kernels. ControlError if one does not say, or if
        the gate has to catch none: nothing would show that it can fail."""
        missing = [name for name in self.expects if gate not in self.executing.get(name, {})]
        if missing or not self.expects:
            raise ControlError(f"controls that do not say what {gate} sees: {', '.join(missing) or 'there are none'}")
        expected = {name: self.executing[name][gate] for name in self.expects}
        if CAUGHT not in expected.values():
            raise ControlError(f"no control has to be caught by {gate}: nothing would show that it can fail")
        return expected


@dataclass(frozen=True)
class Outcome:
    """What the gate said of one control; problem is empty if that was right."""

    name: str
    expects: str
    problem: str


class ControlError(Exception):
    """A control's source does not say what it expects, or cannot be built."""


def read_header(source: Path) -> Header:
    """The first line of a control. ControlError if it has another form."""
    match = _HEADER.fullmatch(source.read_text().split("\n", 1)[0])
    if not match:
        raise ControlError(f"{source}: the first line does not read '{_FORM}'")
    public = int(match["public"]) if match["public"] else None
    return Header(match["sass"], {gate: match[gate] for gate in EXECUTING}, match["build"] or "", public)


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, PATH or /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME")
    if home:
        candidate = Path(home) / "bin" / "nvcc"
        return candidate if candidate.is_file() else None
    try:
        return tools.find("nvcc").resolve()
    except tools.NotRun:
        return None


def _unbranch(ptx: str) -> str:
    """The branch-removal step of the shipped kernels, from its one place."""
    spec = importlib.util.spec_from_file_location("unbranch", UNBRANCH)
    if spec is None or spec.loader is None or not UNBRANCH.exists():
        raise ControlError(f"{UNBRANCH} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.unbranch(ptx)[0]
    return text


def markdown_table() -> str:
    """Control by gate, as the headers declare: the table of docs/gates.md."""
    lines = [f"| control | sass | {' | '.join(EXECUTING)} |", "|---|---|" + "---|" * len(EXECUTING)]
    for source in sorted(SOURCES.rglob("*.cu"), key=lambda path: path.stem):
        header = read_header(source)
        cells = (header.executing[gate] for gate in EXECUTING)
        lines.append(f"| {source.stem} | {header.sass} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _combine(sources: list[Path]) -> str:
    """One source that includes them all, their kernels renamed."""
    lines = []
    for source in sources:
        lines += [f"#define {twin} {source.stem}_{twin}" for twin in TWINS]
        lines += [f'#include "{source.relative_to(SOURCES)}"', *(f"#undef {twin}" for twin in TWINS)]
    return "\n".join(lines) + "\n"


def _compile(sources: list[Path], build: str, nvcc: Path, out: Path) -> None:
    combined = out.with_suffix(".cu")
    combined.write_text(_combine(sources))
    command: list[str | Path] = [nvcc, *_FLAGS, f"-I{SOURCES}", combined]
    if not build:
        tools.run([*command, f"-arch=sm_{_ARCHITECTURE}", "-cubin", "-o", out])
        return
    if build == "relocatable":
        unlinked = out.with_suffix(".o")
        tools.run([*command, f"-arch=sm_{_ARCHITECTURE}", "-rdc=true", "-cubin", "-o", unlinked])
        tools.run([nvcc.parent / "nvlink", f"-arch=sm_{_ARCHITECTURE}", "-o", out, unlinked])
        return
    ptx = out.with_suffix(".ptx")
    target = f"-gencode=arch=compute_{_ARCHITECTURE},code=compute_{_ARCHITECTURE}"
    tools.run([*command, target, "-ptx", "-o", ptx])
    ptx.write_text(_unbranch(ptx.read_text()))
    tools.run([nvcc.parent / "ptxas", f"-arch=sm_{_ARCHITECTURE}", "-O3", "-o", out, ptx])


def build_controls(out_dir: Path, progress: Callable[[str], None] = lambda _: None) -> list[str]:
    """Compile the controls into out_dir: one cubin per way of building, and manifest.json. What is there already is
    kept if neither the sources nor the compiler have changed (without nvcc: if the sources have not). Returns the
    names. ControlError or NotRun say why not."""
    sources = sorted(SOURCES.rglob("*.cu"), key=lambda path: path.stem)
    if not sources:
        raise ControlError(f"{SOURCES} holds no control")
    headers = {source: read_header(source) for source in sources}
    names = [source.stem for source in sources]
    nvcc = find_nvcc()
    manifest = out_dir / MANIFEST
    old = json.loads(manifest.read_text()) if manifest.exists() else {"cubins": []}
    new = {
        "sources": provenance.of_controls(SOURCES, UNBRANCH),
        "flags": [*_FLAGS, _ARCHITECTURE],
        "compiler": tools.nvcc_version(nvcc) if nvcc else old.get("compiler"),
    }
    if all(old.get(key) == value for key, value in new.items()) and all((out_dir / c).exists() for c in old["cubins"]):
        return names
    if nvcc is None:
        raise tools.NotRun("nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda), so the controls cannot be built")
    progress(f"compiling {len(sources)} controls")
    out_dir.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    cubins = []
    for build in sorted({header.build for header in headers.values()}):
        cubins.append(f"{build or 'plain'}.cubin")
        try:
            _compile([s for s in sources if headers[s].build == build], build, nvcc, out_dir / cubins[-1])
        except tools.NotRun as error:  # the compiler is there: what it refuses is the control's fault
            raise ControlError(f"a control cannot be built: {error}") from error
    expects = {source.stem: headers[source].sass for source in sources}
    executing = {source.stem: headers[source].executing for source in sources}
    public = {source.stem: header.public for source, header in headers.items() if header.public is not None}
    content = {**new, "cubins": cubins, "expects": expects, "executing": executing, "public": public}
    manifest.write_text(json.dumps(content, indent=1) + "\n")
    return names


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Other processes that ask for the same folder wait: two that compile into it would spoil each other's files."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which unlocks


def load_controls(progress: Callable[[str], None] = lambda _: None) -> Controls:
    """All controls: built from the checkout's sources if there are any, else those that were packaged. NotRun or
    ControlError if there are none."""
    folder = PACKAGED
    if SOURCES.is_dir():
        folder = CACHE
        with _alone(folder):
            build_controls(folder, progress)
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise tools.NotRun(f"no controls: neither sources in {SOURCES} nor a packaged {manifest}")
    content = json.loads(manifest.read_text())
    cubins = [(folder / name).read_bytes() for name in content["cubins"]]
    return Controls(content["expects"], cubins, content.get("executing", {}), content.get("public", {}))


def judge(expects: str, leak: KernelReport | None, clean: KernelReport | None) -> str:
    """What is wrong with the gate's view of a control; empty if nothing is."""
    if leak is None or clean is None:
        return "does not hold the kernels leak and clean"
    found = {str(finding["kind"]) for finding in leak.secret_findings}
    if clean.verdict != PASS:
        kinds = {str(finding["kind"]) for finding in clean.secret_findings}
        why = [*sorted(kinds), *clean.unknown_opcodes] or [f"{clean.predicated_branches} predicated transfers"]
        return f"clean twin failed: {', '.join(why)}"
    if leak.unknown_opcodes:
        return f"unknown opcodes: {', '.join(leak.unknown_opcodes)}"
    if expects == BLIND:
        return f"found {', '.join(sorted(found))} where nothing was expected" if leak.verdict != PASS else ""
    if expects == LITERAL:
        return "" if leak.predicated_branches and not found else "not caught by the literal count alone"
    if expects not in found:
        return f"planted {expects} was not found (found: {', '.join(sorted(found)) or 'nothing'})"
    return ""


def judge_executed(name: str, expects: str, leak: str, clean: str) -> ControlOutcome:
    """What a gate that executes the kernels saw of a control: leak and clean say it in a line, empty for nothing."""
    problem = ""
    if clean:
        problem = f"clean twin failed: {clean}"
    elif expects == CAUGHT and not leak:
        problem = "the planted leak was not seen"
    elif expects == BLIND and leak:
        problem = f"seen where nothing was expected: {leak}"
    return ControlOutcome(name, expects, leak or "nothing", problem)


def run_controls(controls: Controls) -> list[Outcome]:
    """Put every control through the gate, with a policy that holds what they declare and nothing else."""
    declared = [PublicMemory(f"{name}_*", place, "table", "declared") for name, place in controls.public.items()]
    reports: dict[str, KernelReport] = {}
    for cubin in controls.cubins:
        reports.update((report.kernel, report) for report in audit(Cubin("", cubin), Policy(public_memory=declared)))
    return [
        Outcome(name, expects, judge(expects, *(reports.get(f"{name}_{twin}") for twin in TWINS)))
        for name, expects in controls.expects.items()
    ]
