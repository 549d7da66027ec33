"""A source without comments, blank lines and docstrings.

A verdict is about what runs. A comment does not, so mending one makes no verdict old. Only what is named here is cut
out: everything else counts, a space within a line too. What could be read in two ways is not read: of a file that holds
such a thing, or is of another kind, or is none of its kind, all bytes count.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

_C = (".c", ".h", ".cpp")
# What looks like a comment or an empty line is none inside a literal; and what looks like a literal, an R and a quote
# or a single one, is none inside a name or a number.
_LITERAL = (
    r"""(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"|[A-Za-z_]\w*|\.?\d(?:'?\w|\.)*"
)
# A line that ends in a backslash goes on, with an empty one, too.
_COMMENT = re.compile(rf"(?P<literal>{_LITERAL})|//(?:\\\n|[^\n])*|/\*.*?\*/", re.DOTALL)
_EMPTY = re.compile(rf"(?P<literal>{_LITERAL}|\\\n)|\s*\n", re.DOTALL)
# Not read: other ends of lines, a trigraph, a backslash that only some compilers see at the end of a line, half of a
# comment's sign before such an end, a sign in a header's name.
_ODD_C = re.compile(r"\r|\?\?/|\\[^\S\n]+\n|[/*]\\\n|^\s*#\s*include\s*<[^>\n]*/[/*]", re.MULTILINE)
# Other ends of lines, and an encoding of its own.
_ODD_PYTHON = re.compile(r"\r|\A(?:[^\n]*\n)?[ \t\f]*#[^\n]*coding[:=]")


def without_comments(path: Path) -> bytes:
    """The file's bytes without them."""
    content = path.read_bytes()
    try:
        if path.suffix in _C:
            return _of_c(content.decode()).encode()
        if path.suffix == ".py":
            return _of_python(content.decode()).encode()
    except (SyntaxError, ValueError, tokenize.TokenError):
        pass
    return content


def _of_c(text: str) -> str:
    """A comment is a space to the compiler."""
    if _ODD_C.search(text):
        return text
    bare = _COMMENT.sub(lambda match: match["literal"] or " ", text)
    return _EMPTY.sub(lambda match: match["literal"] or "\n", bare).lstrip()


def _of_python(text: str) -> str:
    """Lines as they stand: tokens themselves are others from version to version of Python."""
    if _ODD_PYTHON.search(text):
        return text
    lines, tree = text.split("\n"), ast.parse(text)
    kept = {row + 1 for row, line in enumerate(lines, 1) if line.endswith("\\")}  # it goes on
    for node in ast.walk(tree):  # tokenized only by some versions
        if isinstance(node, ast.JoinedStr):
            kept.update(_rows(node))
    empty = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        if token.type == tokenize.NL and row not in kept and not lines[row - 1].strip():  # and so in no literal
            empty.add(row)
    for docstring in _docstrings(tree):
        rows = _rows(docstring)
        before = lines[rows[0] - 1].encode()[: docstring.col_offset]
        behind = lines[rows[-1] - 1].encode()[docstring.end_col_offset :]
        if rows[0] not in kept and not before.strip() and not behind.strip():
            empty.update(rows)
    return "\n".join(line for row, line in enumerate(lines, 1) if row not in empty)


def _rows(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            value = node.body[0].value if isinstance(node.body[0], ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value
