"""What a source says: what is cut out, and that nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_safe_fa.gates.said import said

C = """#include "a.h" // why
/* What it does,

   at length. */
int f(int x /* what */) {

  const char *s = "// no comment", c = '"'; // a \\
still the comment
  return x / 2 /* "half" */; }
"""
C_SAYS = """#include "a.h"
int f(int x  ) {
  const char *s = "// no comment", c = '"';
  return x / 2  ; }
"""
PYTHON = '''"""Of the module."""

import a  # why


# What it does.
def f(x: int) -> str:
    """At

    length."""
    y = {
        # of what

        "# no comment": x,  # why
    }
    """No docstring."""
    return """

# no comment

"""


class Empty:
    """Nothing."""


class OneLine: "its docstring"
'''
PYTHON_SAYS = '''import a
def f(x: int) -> str:
    y = {
        "# no comment": x,
    }
    """No docstring."""
    return """

# no comment

"""
class Empty:
class OneLine: "its docstring"
'''


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.c", C, C_SAYS),
        ("a.h", "\n" + C, C_SAYS),
        ("a.cpp", C + "\n\n", C_SAYS),
        ("a.cpp", 'auto s = R"x(// )"\n\n)x"; // why\n', 'auto s = R"x(// )"\n\n)x";\n'),
        ("a.py", PYTHON, PYTHON_SAYS),
        ("a.cu", C, C),
        ("a.json", "// 1\n", "// 1\n"),
    ],
)
def test_what_is_said(name: str, text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert said(path).decode() == says


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("a.c", "int a;", "int  a;"),
        ("a.c", 's = "a//b";', 's = "a//c";'),
        ("a.c", "s = '\\\''; // a\nint a;", "s = '\\\''; // a\nint b;"),
        ("a.c", "a /* x */ b", "ab"),
        ("a.c", "a //\nb", "a // b"),
        ("a.py", "if a:\n    b\n    c\n", "if a:\n    b\nc\n"),
        ("a.py", "a = '#b'\n", "a = '#c'\n"),
        ("a.py", 'a = """\n\n"""\n', 'a = """\n"""\n'),
        ("a.py", "def f(): 'a'; b\n", "def f(): 'a'; c\n"),
    ],
)
def test_what_runs_otherwise_says_otherwise(name: str, one: str, other: str, tmp_path: Path) -> None:
    path, beside = tmp_path / name, tmp_path / f"b{Path(name).suffix}"
    path.write_text(one)
    beside.write_text(other)
    assert said(path) != said(beside)
