"""The release checklist refuses at the first thing that is not true, and says which."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import load

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


release = load(ROOT / ".ci" / "release.py")
STEPS = [step.__name__ for step in release.CHECKLIST]


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A committed project whose texts are ready for 1.2.3, with a full dist/."""
    (tmp_path / "dhp_safe_fa").mkdir()
    (tmp_path / "dhp_safe_fa" / "_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-01-31\n")
    classifiers = "".join(f'"Programming Language :: Python :: {python}",\n' for python in ("3.10", "3.14"))
    (tmp_path / "pyproject.toml").write_text(classifiers)
    (tmp_path / "README.md").write_text("true\n")
    (tmp_path / ".gitignore").write_text("/dist/\n/build/\n")
    (tmp_path / "build" / "cubins").mkdir(parents=True)
    (tmp_path / "build" / "cubins" / "one.cubin").touch()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "dhp_safe_fa-1.2.3.tar.gz").touch()
    for tag in ("cp310-cp310", "cp314-cp314"):
        (tmp_path / "dist" / f"dhp_safe_fa-1.2.3-{tag}-manylinux_2_34_x86_64.whl").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "ready")
    return tmp_path


class Commands:
    """Stands in for make, the build and the gates; git is the real one. fails: words of the command that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.fails, self.writes = "", ""
        self._output: Callable[..., str] = release.output
        monkeypatch.setattr(release, "output", self.output)
        monkeypatch.setattr(release, "passes", self.passes)

    def output(self, root: Path, *command: str) -> str:
        if command[0] == "git":
            return self._output(root, *command)
        if "--write" in command and self.writes:
            Path(command[-1]).write_text(self.writes)
        self.passes(root, *command)
        return ""

    def passes(self, root: Path, *command: str, **environment: str) -> None:
        self.run.append(" ".join(command))
        self.environments.append(environment)
        if self.fails and f" {self.fails} " in f" {self.run[-1]} ":
            raise release.Refused(f"`{self.run[-1]}` ended with 1")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


def ended(capsys: pytest.CaptureFixture[str], project: Path) -> tuple[int, str, str]:
    code = release.main([], project)
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_release_that_is_ready(project: Path, commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, project)
    assert code == 0 and not err and out.count("[x]") == len(STEPS)
    assert "ready: git tag v1.2.3" in out
    assert [line for line in commands.run if line.startswith("make")] == [
        "make lint", "make test-long", "make test", "make package",
    ]  # fmt: skip
    packaging = commands.environments[commands.run.index("make package")]
    assert packaging == {"PYTHONS": "all", "TORCHES": "torch==2.10.* torch", "FROM_NOTHING": "1"}


def uncommitted(project: Path) -> None:
    (project / "forgotten.c").touch()


def other_version(project: Path) -> None:
    (project / "dhp_safe_fa" / "_version.py").write_text('__version__ = "1.2.4"\n')


def not_final(project: Path) -> None:
    (project / "dhp_safe_fa" / "_version.py").write_text('__version__ = "1.2.3-rc.1"\n')


def dated(day: str) -> Callable[[Path], None]:
    def write(project: Path) -> None:
        (project / "CHANGELOG.md").write_text(f"## [1.2.3] - {day}\n")

    return write


def tagged(project: Path) -> None:
    git(project, "tag", "v1.2.3")


def without_kernels(project: Path) -> None:
    (project / "build" / "cubins" / "one.cubin").unlink()


def without_wheel(project: Path) -> None:
    (project / "dist" / "dhp_safe_fa-1.2.3-cp314-cp314-manylinux_2_34_x86_64.whl").unlink()


def not_repaired(project: Path) -> None:
    (project / "dist" / "dhp_safe_fa-1.2.3-cp310-cp310-linux_x86_64.whl").touch()


def without_archive(project: Path) -> None:
    (project / "dist" / "dhp_safe_fa-1.2.3.tar.gz").unlink()


@pytest.mark.parametrize(
    ("spoil", "step", "sentence"),
    [
        (uncommitted, "clean", "?? forgotten.c"),
        (other_version, "version", "CHANGELOG.md begins with 1.2.3, _version.py says 1.2.4"),
        (not_final, "version", "1.2.3-rc.1; a release is MAJOR.MINOR.PATCH"),
        (dated("unreleased"), "version", "gives 1.2.3 no day (YYYY-MM-DD) but 'unreleased'"),
        (dated("9999-01-01"), "version", "dates 1.2.3 9999-01-01, which is to come"),
        (tagged, "version", "the tag v1.2.3 is there already"),
        (without_kernels, "built", "no GPU kernel was built"),
        (without_wheel, "complete", "no manylinux wheel of Python 3.14"),
        (not_repaired, "complete", "also dhp_safe_fa-1.2.3-cp310-cp310-linux_x86_64.whl"),
        (without_archive, "complete", "no source archive"),
    ],
)
def test_what_is_not_true_is_refused(
    project: Path, commands: Commands, capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None], step: str, sentence: str,
) -> None:  # fmt: skip
    spoil(project)
    if step != "clean":
        git(project, "add", "--all")
        git(project, "commit", "--quiet", "--allow-empty", "--message", "spoilt")
    code, out, err = ended(capsys, project)
    assert code == 1 and err.startswith(f"refused at {step}: ") and sentence in err
    reached = STEPS.index(step)
    assert out.count("[x]") == reached and f"[!] {step}: " in out and out.count("[ ]") == len(STEPS) - reached - 1


@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("build_ext", "built"), ("--verify", "built"),
        ("dhp_safe_fa.gates status", "evidence"), ("status --write", "readme"),
        ("make lint", "lint"), ("make test-long", "tests"), ("make test", "tests"), ("make package", "wheels"),
    ],
)  # fmt: skip
def test_a_command_that_fails_is_refused(
    project: Path, commands: Commands, capsys: pytest.CaptureFixture[str], command: str, step: str
) -> None:
    commands.fails = command
    code, _, err = ended(capsys, project)
    assert code == 1 and err.startswith(f"refused at {step}: ") and command in err
    assert command in commands.run[-1], "something was run after the refusal"


def test_an_untrue_readme_is_refused(
    project: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.writes = "true today\n"
    code, _, err = ended(capsys, project)
    assert code == 1 and err.startswith("refused at readme: README.md is out of date")
    assert (project / "README.md").read_text() == "true\n", "looking at it has changed it"


def test_files_that_packaging_leaves_are_refused(
    project: Path, commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(root: Path, *command: str, **_: Any) -> None:
        (root / "left.txt").touch()

    monkeypatch.setattr(release, "passes", leave)
    code, _, err = ended(capsys, project)
    assert code == 1 and err.startswith("refused at complete: ") and "left.txt" in err


def test_commands_that_fail_say_so(project: Path) -> None:
    with pytest.raises(release.Refused, match="`false` ended with 1"):
        release.passes(project, "false")
    with pytest.raises(release.Refused, match=r"`git no-such-command` ended with 1:\n.*no-such-command"):
        release.output(project, "git", "no-such-command")


def test_the_list_looks_at_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--list"], tmp_path) == 0
    assert capsys.readouterr().out.count("[ ]") == len(STEPS)


def test_this_project_is_one_that_the_list_can_read() -> None:
    assert release.pythons_of(ROOT) == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert release.version_of(ROOT)
