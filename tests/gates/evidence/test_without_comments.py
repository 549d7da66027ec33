"""A source without comments: what is cut out, and that nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_safe_fa.gates.without_comments import without_comments

C = """#include "a.h" // why
/* What it does,

   at length. */
int f(int x /* what */) {

  const char *s = "// no comment", c = '"'; // a \\
still the comment
  return x / 2 /* "half" */; }
"""
C_LEFT = """#include "a.h"
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
PYTHON_LEFT = '''import a
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
    ("name", "text", "left"),
    [
        ("a.c", C, C_LEFT),
        ("a.h", "\n" + C, C_LEFT),
        ("a.cpp", C + "\n\n", C_LEFT),
        ("a.cpp", 'auto s = R"x(// )"\n\n)x"; // why\n', 'auto s = R"x(// )"\n\n)x";\n'),
        ("a.py", PYTHON, PYTHON_LEFT),
        ("a.cu", C, C),
        ("a.json", "// 1\n", "// 1\n"),
    ],
)
def test_what_is_left(name: str, text: str, left: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert without_comments(path).decode() == left


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("a.c", "int a;", "int  a;"),
        ("a.c", 's = "a//b";', 's = "a//c";'),
        ("a.c", "s = '\\''; // a\nint a;", "s = '\\''; // a\nint b;"),
        ("a.c", "a /* x */ b", "ab"),
        ("a.c", "a //\nb", "a // b"),
        ("a.py", "if a:\n    b\n    c\n", "if a:\n    b\nc\n"),
        ("a.py", "a = '#b'\n", "a = '#c'\n"),
        ("a.py", 'a = """\n\n"""\n', 'a = """\n"""\n'),
        ("a.py", "def f(): 'a'; b\n", "def f(): 'a'; c\n"),
        # ends of lines that only some read, and lines that go on
        ("a.c", "#define R \\\n\nr=2;\n", "#define R \\\nr=2;\n"),
        ("a.c", "#define R \\\n// why\nr=2;\n", "#define R \\\nr=2;\n"),
        ("a.c", "/\\\n* // */ r=2;\n", "/\\\n* // */ r=3;\n"),
        ("a.c", "/* a *\\\n/ r=2; /* */\n", "/* a *\\\n/ r=3; /* */\n"),
        ("a.c", "// a \\ \n/*\nr=2;\n// */\n", "// a \\ \n/*\nr=3;\n// */\n"),
        ("a.c", "// a\rr=2;\n", "// a\rr=3;\n"),
        ("a.c", "// a ??/\nr=2;\n", "// a ??/\nr=3;\n"),
        ("a.py", "# a\rr=2\n", "# a\rr=3\n"),
        ("a.py", "def f(): \\\n    'doc'\nprint(2)\n", "def f(): \\\nprint(2)\n"),
        ("a.py", "    \\\n# c\nprint(1)\n", "    \\\nprint(1)\n"),
        ("a.py", "f'''{\nx\n\n=}'''\n", "f'''{\nx\n=}'''\n"),
        # what looks like a literal
        ("a.cpp", "int x=1'0; const char*s=\"'//\"; r=2;", "int x=1'0; const char*s=\"'//\"; r=3;"),
        ("a.cpp", 'FOOR"x("; // )x" /*\nr=2;\n// */', 'FOOR"x("; // )x" /*\nr=3;\n// */'),
        ("a.c", "#include </tmp//b.h>\n", "#include </tmp//c.h>\n"),
        ("a.py", "# coding: utf-8\nx = 'é'\n", "# coding: latin-1\nx = 'é'\n"),
        # none of their kind
        ("a.py", "x = (  # a\n", "x = (  # b\n"),
        ("a.py", "\ufeffx  # a\n", "\ufeffx  # b\n"),
    ],
)
def test_what_runs_otherwise_is_left_otherwise(name: str, one: str, other: str, tmp_path: Path) -> None:
    path, beside = tmp_path / name, tmp_path / f"b{Path(name).suffix}"
    path.write_text(one, newline="")
    beside.write_text(other, newline="")
    assert without_comments(path) != without_comments(beside)
