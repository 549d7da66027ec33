"""A call in a process of its own: some peers end the one that they run in, on an input that they do not serve."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

from dhp_safe_fa.bench.peers import one_line

from ..controls import ControlError
from ..tools import NotRun

P = ParamSpec("P")
T = TypeVar("T")


class Ended(RuntimeError):
    """Without a result; says how."""


def said(error: Exception) -> str:
    """In a line, with its class where it is not one whose text is a sentence of its own."""
    line = one_line(error)
    return line if isinstance(error, NotRun | ControlError | Ended) else f"{type(error).__name__}: {line}"


def _answer(connection: Connection, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> None:
    try:
        connection.send((function(*arguments, **options), ""))
    except Exception as error:  # whatever it is: its class may not be one that can be sent
        connection.send((None, said(error)))


def in_a_process(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What the function, of a module, returns in a new process. Ended if it raises, or its process ends before."""
    fresh = multiprocessing.get_context("spawn")  # a process with CUDA in use cannot be forked
    here, there = fresh.Pipe(duplex=False)
    process = fresh.Process(target=_answer, args=(there, function, *arguments), kwargs=options)
    process.start()
    there.close()
    try:
        result, problem = here.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise Ended(f"its process ended with {how}") from None
    process.join()
    if problem:
        raise Ended(problem)
    answer: T = result
    return answer
