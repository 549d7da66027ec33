"""The controls of the gate bitwise: attention whose rows depend on company, judged as a shipped kernel is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from dhp_safe_fa.gates import controls
from dhp_safe_fa.gates.bitwise import controls as bitwise_controls
from dhp_safe_fa.gates.bitwise import rows as bitwise_rows
from dhp_safe_fa.gates.verdict import ControlOutcome


class OnTheCpu:
    """row_variance as torch computes it: the sum of a row's 32 terms, or (the leak, one row) of two halves of them."""

    def launch(self, control: str, twin: str, secret: Tensor, out: Tensor, grid: int = 1) -> None:
        assert control == "row_variance"
        halves = secret[: grid * 128 * 32].view(grid * 128, 2, 16).double().sum(-1)
        is_split = twin == "leak" and grid == 1
        out[: grid * 128] = halves.float().sum(-1) if is_split else halves.sum(-1).float()


@pytest.mark.parametrize("company", bitwise_controls.COMPANY)
def test_rows_that_depend_on_their_company_are_found(company: str) -> None:
    outcome = bitwise_controls.company_outcome(OnTheCpu(), company, "cpu")  # type: ignore[arg-type]
    assert (outcome.name, outcome.expects, outcome.problem) == (f"row_variance: {company}", controls.CAUGHT, "")
    assert "became" in outcome.seen


@pytest.mark.parametrize("blind_to", bitwise_controls.COMPANY)
def test_a_gate_that_does_not_look_at_some_company_is_noticed(blind_to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted attention goes the way of a shipped kernel: what is left out there, the control shows."""
    words = {"batches": ("batch",), "heads": ("head",), "rows": ("the first", "the last", "alone", "only the keys"),
             "keys": ("more",), "other rows": ("other rows",), "another form": ("as another",)}[blind_to]  # fmt: skip
    for name in ("company", "_rows", "_forms", "_offsets"):
        ways = getattr(bitwise_rows, name)

        def fewer(*given: object, ways: Callable[..., Iterator[bitwise_rows.Way]] = ways) -> list[bitwise_rows.Way]:
            return [way for way in ways(*given) if not any(word in way.name for word in words)]

        monkeypatch.setattr(bitwise_rows, name, fewer)
    outcome = bitwise_controls.company_outcome(OnTheCpu(), blind_to, "cpu")  # type: ignore[arg-type]
    assert outcome.problem == "the planted leak was not seen"


def test_a_comparison_that_sees_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise_rows, "compare_outputs", lambda *_: "")
    outcome = bitwise_controls.company_outcome(OnTheCpu(), "batches", "cpu")  # type: ignore[arg-type]
    assert outcome.problem == "the planted leak was not seen"


def test_every_control_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {path.stem: controls.read_header(path).executing for path in controls.SOURCES.rglob("*.cu")}
    loaded = controls.Controls(dict.fromkeys(declared, "blind"), [], declared)
    seen = ControlOutcome("row_variance: batches", controls.CAUGHT, "something")
    monkeypatch.setattr(controls, "load_controls", lambda *_: loaded)
    monkeypatch.setattr(bitwise_controls, "Planted", lambda _: None)
    monkeypatch.setattr(bitwise_controls.inputs, "planted_secrets", lambda _: {"normal": None})
    monkeypatch.setattr(bitwise_controls, "repeat", lambda *_: "")
    monkeypatch.setattr(bitwise_controls, "company_outcome", lambda *_: seen)
    found = bitwise_controls.control_outcomes(10, lambda _: None)
    assert [one for one in found if one == seen] == [seen] * len(bitwise_controls.COMPANY)
    assert {one.name for one in found} == (set(declared) - {"row_variance"}) | {seen.name}
    assert {one.name for one in found if one.problem} == {
        name for name, executing in declared.items() if executing["bitwise"] == "caught" and name != "row_variance"
    }
