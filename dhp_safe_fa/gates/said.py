"""What a source says: its text without comments, blank lines and docstrings.

A verdict is about what runs. A comment does not, so mending one makes no verdict old. Only what is named here is cut
out: everything else counts, a space too, and a file of another kind says all of its bytes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

_C = (".c", ".h", ".cpp")
# What looks like a comment or an empty line is none inside a literal.
_LITERAL = r"""R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
# A line that ends in a backslash goes on.
_COMMENT = re.compile(rf"(?P<literal>{_LITERAL})|//(?:\\\n|[^\n])*|/\*.*?\*/", re.DOTALL)
_EMPTY = re.compile(rf"(?P<literal>{_LITERAL})|\s*\n", re.DOTALL)


def said(path: Path) -> bytes:
    """The file's bytes without what is not said by it. UnicodeDecodeError or SyntaxError if it is none of its kind."""
    content = path.read_bytes()
    if path.suffix in _C:
        return _of_c(content.decode()).encode()
    return _of_python(content.decode()).encode() if path.suffix == ".py" else content


def _of_c(text: str) -> str:
    """A comment is a space to the compiler."""
    bare = _COMMENT.sub(lambda match: match["literal"] or " ", text)
    return _EMPTY.sub(lambda match: match["literal"] or "\n", bare).lstrip()


def _of_python(text: str) -> str:
    """Lines as they stand: tokens themselves are others from version to version of Python."""
    lines = text.split("\n")
    empty = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        if token.type == tokenize.NL and not lines[row - 1].strip():  # and so not inside a literal
            empty.add(row)
    for docstring in _docstrings(ast.parse(text)):
        rows = range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
        before = lines[rows[0] - 1].encode()[: docstring.col_offset]
        behind = lines[rows[-1] - 1].encode()[docstring.end_col_offset :]
        if not before.strip() and not behind.strip():
            empty.update(rows)
    return "\n".join(line for row, line in enumerate(lines, 1) if row not in empty)


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            value = node.body[0].value if isinstance(node.body[0], ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value
