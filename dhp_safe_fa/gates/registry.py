"""The gates, in the order in which they run: the one place that lists them.

A new gate is a package ``dhp_safe_fa/gates/NAME/`` whose module ``gate`` has ``run(subjects, quick, progress)``, and a
line here. Every planted leak then has to say what that gate sees of it (controls.py), and every contract named here
needs its row in README.md. Nothing is imported, so that evidence.py can ask without torch, rich or a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

# Parts that each family of kernels, and that each kernel has for itself.
BY_FAMILY, BY_KERNEL = ("launch", "family"), ("kernels",)


@dataclass(frozen=True)
class Gate:
    """One gate.

    Attributes:
        name: of its package, and on the command line.
        purpose: one line for ``--help``.
        contracts: rows of README's table that rest on its verdicts alone.
        needs: what its verdict depends on beside machine code and the gates' own sources: names of provenance.py,
            those of BY_FAMILY and BY_KERNEL without the family's or the kernel's.
        executes: it runs kernels on a GPU, in the way that all such gates share (``subjects`` and ``verdict``).
        quick_is_evidence: a run with fewer repeats may be stored as evidence, and says so.
        draws: its module has ``plot(results, path)``.
        piece: how many kernels it takes in one process at most, where evidence is gathered piece by piece: controls
            come once in each, and what is lost with a piece is looked at anew.
        can_end_early: where ``progress`` raises TimeoutError it judges what it has measured, and says of the others
            that they were not run.
    """

    name: str
    purpose: str
    contracts: tuple[str, ...]
    needs: tuple[str, ...] = ("launch", "family", "controls")
    executes: bool = True
    quick_is_evidence: bool = False
    draws: bool = False
    piece: int = 12
    can_end_early: bool = False

    def took_part(self, kernel: str, family: str) -> tuple[str, ...]:
        """What its verdict on that kernel, of that family, depends on, by the names of provenance.py."""
        own = {**dict.fromkeys(BY_FAMILY, family), **dict.fromkeys(BY_KERNEL, kernel)}
        needs = (f"{need} {own[need]}" if need in own else need for need in self.needs)
        return *needs, "shared", f"gate {self.name}"


GATES = (
    Gate("sass", "machine code: no predicated branch, no secret that steers; needs no GPU", ("C1", "C2"),
         needs=("controls", "policy"), executes=False, piece=1000),
    Gate("counters", "hardware counters: equal on all inputs, to the last digit", ("C3",), quick_is_evidence=True,
         piece=30),
    Gate("bitwise", "the same bytes in every run, and whatever else is computed beside a row", ("C4", "C5", "C10"),
         needs=("launch", "family", "kernels", "controls")),
    Gate("timing", "no evidence in time for classes of inputs with equal bit statistics", ("C6",),
         quick_is_evidence=True, draws=True, piece=30, can_end_early=True),
)  # fmt: skip
NAMES = tuple(gate.name for gate in GATES)
EXECUTING = tuple(gate.name for gate in GATES if gate.executes)
# The contract that every claim names its binary: it rests on all gates.
BINDING = "C9"


def gate(name: str) -> Gate:
    """The gate of that name. KeyError for another."""
    return {gate.name: gate for gate in GATES}[name]
