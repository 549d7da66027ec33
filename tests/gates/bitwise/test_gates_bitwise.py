"""The gate bitwise: comparing, repeating and recomputing rows on the CPU; poisoned memory and the load on the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.gates import cli, controls, inputs, subjects
from dhp_safe_fa.gates.bitwise import compare as bitwise_compare
from dhp_safe_fa.gates.bitwise import gate as bitwise
from dhp_safe_fa.gates.bitwise import load as bitwise_load
from dhp_safe_fa.gates.bitwise import memory as bitwise_memory
from dhp_safe_fa.gates.bitwise import rows as bitwise_rows
from dhp_safe_fa.gates.bitwise.compare import compare_outputs, compare_runs, first_difference, repeat
from dhp_safe_fa.gates.bitwise.forms import FORMS
from dhp_safe_fa.gates.bitwise.memory import PoisonedBlocks, WrongMemory, free_sizes
from dhp_safe_fa.gates.bitwise.rows import Rows
from dhp_safe_fa.gates.families import forward
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.subjects import Subject
from dhp_safe_fa.gates.verdict import FAIL, INVALID, NOT_RUN, PASS, ControlOutcome, GateResult

# ---- comparing -------------------------------------------------------------------------------------------------------


def test_the_first_difference_is_named() -> None:
    expected = torch.zeros(2, 3, 4)
    got = expected.clone()
    got[1, 0, 2], got[1, 2, 3] = 1.0, 2.0
    said = first_difference("out", expected, got)
    assert said == "out[1, 0, 2]: 0 (0x00000000) became 1 (0x3f800000); 2 of 24 elements differ"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_compared(dtype: torch.dtype) -> None:
    nan, zero = torch.full((5,), torch.nan, dtype=dtype), torch.zeros(5, dtype=dtype)
    assert first_difference("out", nan, nan.clone()) == ""
    assert "-0 (0x80" in first_difference("out", zero, -zero)


def test_strides_do_not_matter_but_shapes_do() -> None:
    t = torch.randn(3, 4)
    assert first_difference("out", t, t.T.contiguous().T) == ""
    assert "[4, 3]" in first_difference("out", t, t.T)
    assert "float16" in first_difference("out", t, t.half())


def test_each_output_is_compared() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert compare_outputs(("out", "lse"), (a, a), (a, b)).startswith("lse[0]: 0 ")
    assert compare_outputs(("out", "lse"), (b, a), (a, b)).count("became") == 2


# ---- repeating -------------------------------------------------------------------------------------------------------


class Unpoisoned:
    """Memory that is what it is."""

    def __init__(self) -> None:
        self.poisoned: list[int] = []

    def poison(self, run: int) -> None:
        self.poisoned.append(run)

    def check(self, outputs: Sequence[Tensor]) -> None:
        assert outputs


def test_equal_runs_pass_and_each_is_poisoned() -> None:
    memory, beside = Unpoisoned(), list[int]()
    call = lambda: (torch.ones(3), torch.full((2,), torch.nan))  # noqa: E731
    assert compare_runs(call, ("out", "lse"), memory, 20, lambda: beside.append(len(memory.poisoned))) == ""
    assert memory.poisoned == list(range(20)) and beside == list(range(1, 21))


def runs_that_differ(at: dict[int, float]) -> Callable[[], tuple[Tensor, ...]]:
    run: Iterator[int] = iter(range(1000))

    def call() -> tuple[Tensor, ...]:
        out = torch.zeros(4, 5)
        out[2, 3] = at.get(next(run), 0.0)
        return (out,)

    return call


@pytest.mark.parametrize("bad", [1, 7, 32, 33, 64, 65, 69])  # 32 are compared at a time
@pytest.mark.parametrize("at_a_time", [2**28, 0])
def test_one_bad_run_among_many_is_found(bad: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise_compare, "_BATCH_BYTES", at_a_time)
    said = compare_runs(runs_that_differ({bad: 1.0}), ("out",), Unpoisoned(), 70)
    assert said.startswith("out[2, 3]: 0 (0x00000000) became 1 (0x3f800000); 1 of 20 elements differ; ")
    assert said.endswith(f"1 of 69 runs differ from the first, run {bad} before all others")


def test_bad_runs_are_counted_and_the_last_is_shown() -> None:
    said = compare_runs(runs_that_differ({3: 1.0, 40: 2.0, 42: 3.0, 43: 0.0}), ("out",), Unpoisoned(), 70)
    assert "became 3 (" in said and said.endswith("3 of 69 runs differ from the first, run 3 before all others")


@pytest.mark.parametrize(("at_a_time", "compared"), [(2**28, 3), (160, 35), (0, 69)])  # an output has 80 bytes
def test_so_many_runs_are_compared_at_a_time(at_a_time: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise_compare, "_BATCH_BYTES", at_a_time)
    batches: list[int] = []
    compare = bitwise_compare.Batch.compare

    def counted(batch: bitwise_compare.Batch) -> None:
        batches.append(batch._held)
        compare(batch)

    monkeypatch.setattr(bitwise_compare.Batch, "compare", counted)
    assert compare_runs(runs_that_differ({}), ("out",), Unpoisoned(), 70) == ""
    assert len([held for held in batches if held]) == compared and sum(batches) == 69


@pytest.mark.parametrize(
    ("first", "then", "differs"),
    [(0x0000, 0x8000, True), (0x7FC0, 0x7FC1, True), (0x7FC0, 0x7FC0, False)],
    ids=["zeros of two signs", "NaN of two payloads", "NaN"],
)
def test_bits_of_runs_are_compared(first: int, then: int, differs: bool) -> None:
    patterns = iter([first, *[then] * 40])

    def call() -> tuple[Tensor, ...]:
        return (torch.tensor([next(patterns)], dtype=torch.uint16).view(torch.bfloat16),)

    assert bool(compare_runs(call, ("out",), Unpoisoned(), 41)) == differs


def test_all_outputs_of_each_run_are_looked_for_in_the_poisoned_memory() -> None:
    looked_at: list[int] = []

    class Looked(Unpoisoned):
        def check(self, outputs: Sequence[Tensor]) -> None:
            looked_at.append(len(outputs))

    assert compare_runs(lambda: (torch.ones(3), torch.ones(2)), ("out", "lse"), Looked(), 40) == ""
    assert looked_at == [2] * 40


@pytest.mark.parametrize(
    "then", [torch.ones(1, 2), torch.ones(1), torch.ones(2, 1), torch.ones(1, 2, dtype=torch.float16)], ids=str
)
def test_runs_with_outputs_of_unlike_shapes_or_types_differ(then: Tensor) -> None:
    first = torch.ones(2, 1, dtype=torch.float16)
    outputs = iter([first, first, then])
    said = compare_runs(lambda: (next(outputs),), ("out",), Unpoisoned(), 3)
    assert said == f"out: {then.dtype} {list(then.shape)} instead of torch.float16 [2, 1]; in run 2"


def test_runs_with_unlike_numbers_of_outputs_differ() -> None:
    outputs = iter([2, 2, 1])
    call = lambda: (torch.ones(3),) * next(outputs)  # noqa: E731
    assert compare_runs(call, ("out", "lse"), Unpoisoned(), 3) == "1 outputs instead of 2; in run 2"


def test_the_first_run_has_the_bits_that_it_has_alone() -> None:
    one = lambda: (torch.ones(3),)  # noqa: E731
    assert compare_runs(one, ("out",), Unpoisoned(), 3, alone=one()) == ""
    said = compare_runs(one, ("out",), Unpoisoned(), 3, alone=(torch.tensor([1.0, 2.0, 1.0]),))
    assert said.startswith("out[1]: 2 ") and said.endswith("in the first run, which differs from one alone")


def test_a_difference_in_another_output_alone_is_found() -> None:
    differs = runs_that_differ({7: 1.0})
    said = compare_runs(lambda: (torch.ones(3), *differs()), ("lse", "out"), Unpoisoned(), 50)
    assert said.startswith("out[2, 3]: 0 ")
    assert said.endswith("1 of 49 runs differ from the first, run 7 before all others")


def test_a_bad_first_run_is_found() -> None:
    assert "49 of 49 runs" in compare_runs(runs_that_differ({0: 1.0}), ("out",), Unpoisoned(), 50)


def test_no_output_outlives_its_run() -> None:
    """Or the memory of one run would not be there for the next."""
    alive: list[int] = []

    class Counted(Unpoisoned):
        def poison(self, run: int) -> None:
            assert not alive

    def call() -> tuple[Tensor, ...]:
        out = torch.zeros(3)
        alive.append(1)
        weakref.finalize(out, alive.pop)
        return (out,)

    assert compare_runs(call, ("out",), Counted(), 10) == ""


def test_the_operator_repeats() -> None:
    q, k, v = inputs.make("normal", Shape(1, 4, 2, 33, 70, 64, "float16", True), 1, "cpu")
    call = lambda: dhp_safe_fa.attention_lse(q, k, v, is_causal=True)  # noqa: E731
    assert compare_runs(call, ("out", "lse"), Unpoisoned(), 20) == ""


# ---- rows ------------------------------------------------------------------------------------------------------------


def ours(given: inputs.Inputs, is_causal: bool) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*given, is_causal=is_causal)


SHAPES = [
    Shape(2, 4, 2, 150, 200, 64, "float16", True),
    Shape(2, 4, 2, 150, 200, 64, "float16", False),
    Shape(1, 2, 2, 140, 140, 72, "bfloat16", True),
    Shape(2, 2, 1, 1, 5, 64, "float16", True),
]


def rows(
    shape: Shape,
    attend: subjects.Attend,
    offset: subjects.AttendOffset | None = None,
    outputs: tuple[str, ...] = ("out", "lse"),
) -> Rows:
    subject = Subject("a", attend, nullcontext, ("a",), (shape,), attend_offset=offset, outputs=outputs)
    return bitwise_rows.rows_of_shape(subject, shape, "normal", "normal", seed=1, device="cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_operator_is_row_invariant(shape: Shape) -> None:
    found = rows(shape, ours, forward.attend_offset)
    assert (found.differing, found.refused) == ([], []) and found.ways >= 7


@pytest.mark.parametrize(("own", "company"), inputs.ROW_CLASSES.items())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_operator_is_row_invariant_on_every_class(own: str, company: str, dtype: str) -> None:
    shape = Shape(1, 2, 1, 20, 150, 64, dtype, True)
    subject = Subject("ours", ours, nullcontext, ("ours",), (shape,), "", forward.attend_offset)
    found = bitwise_rows.rows_of_shape(subject, shape, own, company, seed=1, device="cpu")
    assert (found.differing, found.refused) == ([], [])


# ---- forms -----------------------------------------------------------------------------------------------------------


def in_forms(shape: Shape, own: str = "normal", company: str = "normal") -> Rows:
    subject = Subject("ours", ours, nullcontext, ("ours",), (shape,), forms=FORMS)
    everything = bitwise_rows.rows_of_shape(subject, shape, own, company, seed=1, device="cpu")
    ways = [line for line in everything.differing if line.startswith("as ")]
    assert everything.refused == [] and len(ways) == len(everything.differing), "what is not of the forms holds"
    return everything


@pytest.mark.parametrize("shape", [*SHAPES, Shape(3, 8, 1, 3, 700, 128, "bfloat16", False)], ids=str)
def test_rows_are_the_same_in_every_form(shape: Shape) -> None:
    found = in_forms(shape)
    assert found.differing == [] and found.ways == rows(shape, ours).ways + len(FORMS)


@pytest.mark.parametrize(("own", "company"), inputs.ROW_CLASSES.items())
def test_forms_of_every_class(own: str, company: str) -> None:
    assert in_forms(Shape(2, 2, 1, 150, 300, 64, "float16", True), own, company).differing == []


Packed = Callable[..., tuple[Tensor, Tensor]]


def as_one(run: Packed, q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Any:
    """Sequences are not told apart."""
    if not {"page_table", "leftpad_k"} & options.keys():
        starts = (torch.tensor([0, t.shape[0]], dtype=torch.int32) for t in (q, k))
        lengths = (*starts, q.shape[0], k.shape[0])
    return run(q, k, v, *lengths, **options)


def in_order(run: Packed, *given: Any, page_table: Any = None, **options: Any) -> Any:
    """The table of pages is not looked at."""
    if page_table is not None:
        page_table = torch.arange(page_table.numel(), dtype=torch.int32).view(page_table.shape)
    return run(*given, page_table=page_table, **options)


def split_in_small_pages(run: Packed, q: Tensor, k: Tensor, *given: Any, **options: Any) -> Any:
    """A last bit that depends on the size of pages."""
    out, lse = run(q, k, *given, **options)
    return out, lse * (1 + (k.dim() == 4 and k.shape[1] == 16) * 2**-22)


def to_the_end(run: Packed, *given: Any, seqused_k: Any = None, **options: Any) -> Any:
    """All of a sequence's pages count."""
    if seqused_k is not None:
        seqused_k = torch.full_like(seqused_k, options["page_table"].shape[1] * given[1].shape[1])
        given = (*given[:-1], int(seqused_k.max()))
    return run(*given, seqused_k=seqused_k, **options)


def from_the_beginning(run: Packed, *given: Any, leftpad_k: Any = None, **options: Any) -> Any:
    """Keys of padding count."""
    return run(*given, leftpad_k=None if leftpad_k is None else 0 * leftpad_k, **options)


@pytest.mark.parametrize(
    ("wrong", "forms"),
    [
        (as_one, {"packed sequences"}),
        (in_order, {"pages of 16 keys", "pages of 256 keys"}),
        (split_in_small_pages, {"pages of 16 keys"}),
        (to_the_end, {"pages of 16 keys", "pages of 256 keys"}),
        (from_the_beginning, {"sequences padded on the left"}),
    ],
)
def test_each_form_finds_its_fault(wrong: Any, forms: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dhp_safe_fa, "attention_varlen_lse", partial(wrong, dhp_safe_fa.attention_varlen_lse))
    problems = in_forms(Shape(2, 4, 2, 150, 300, 64, "float16", False)).differing
    assert {problem.partition(":")[0] for problem in problems} == {f"as {form}" for form in forms}


def test_outputs_that_share_their_memory_are_not_compared_with_themselves() -> None:
    kept = torch.zeros(2, 4, 450, 64)

    def attend(given: inputs.Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        q = given[0]
        kept[:] = q.size(0)  # what a row is depends on the batch
        return (kept[: q.size(0), : q.size(1), : q.size(2)],)

    found = rows(Shape(1, 2, 2, 150, 150, 64, "float16", False), attend, outputs=("out",))
    assert [line.partition(":")[0] for line in found.differing] == ["other batches beside"]


def test_offsets_add_ways() -> None:
    assert rows(SHAPES[0], ours, forward.attend_offset).ways == rows(SHAPES[0], ours).ways + 7


def with_fault(fault: Callable[[Tensor, Tensor], float]) -> subjects.Attend:
    """The operator, but for a last bit that depends on q's or k's shape."""

    def attend(given: inputs.Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        out, lse = ours(given, is_causal)
        return out, lse * (1 + fault(*given[:2]) * 2**-22)

    return attend


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        (lambda q, k: q.size(2) == 1, ["the first 1 rows", "row 75 alone", "row 149 alone"]),
        (lambda q, k: q.size(2) < 128, ["the first 1 rows", "the first 17 rows", "the first 64 rows"]),
        (lambda q, k: k.size(0) > 2, ["other batches beside"]),
        (lambda q, k: q.size(0) == 1, ["its batch alone"]),
        (lambda q, k: q.size(1) > 4, ["other heads beside"]),
        (lambda q, k: q.size(1) < 4, ["its key head alone"]),
    ],
)
def test_each_way_finds_its_fault(fault: Callable[[Tensor, Tensor], float], ways: list[str]) -> None:
    problems = rows(SHAPES[1], with_fault(fault)).differing
    found = [problem.partition(":")[0] for problem in problems]
    assert set(ways) <= set(found)
    assert "lse[" in problems[0] and "became" in problems[0]


def test_padding_finds_a_split_that_depends_on_the_keys() -> None:
    problems = rows(SHAPES[2], with_fault(lambda q, k: k.size(2) > 140)).differing
    assert [problem.partition(":")[0] for problem in problems] == ["1 more rows and keys", "130 more rows and keys"]


def test_other_rows_that_mix_in_are_found() -> None:
    def attend(given: inputs.Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        out, lse = ours(given, is_causal)
        return out, lse + given[0].float().abs().amax(dim=(2, 3), keepdim=True)[..., 0] * 1e-3

    found = [problem.partition(":")[0] for problem in rows(SHAPES[1], attend).differing]
    assert "other rows beside" in found


def test_what_a_peer_does_not_serve_is_counted() -> None:
    def attend(given: inputs.Inputs, is_causal: bool) -> tuple[Tensor, ...]:
        if given[0].size(2) == 1:
            raise RuntimeError("no such shape\nwith details")
        return ours(given, is_causal)

    found = rows(SHAPES[1], attend)
    assert found.differing == [] and "row 149 alone: refused: no such shape" in found.refused
    assert found.ways == rows(SHAPES[1], ours).ways


# ---- verdicts --------------------------------------------------------------------------------------------------------

RIGHT = [ControlOutcome("planted", controls.CAUGHT, "something")]


def examine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    repeats: tuple[str, ...] = (),
    share: float = 0.9,
    differing: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    kernels: tuple[str, ...] = ("a",),
    ways: int = 18,
) -> tuple[str, list[str]]:
    monkeypatch.setattr(bitwise, "repeat_shape", lambda *_: (list(repeats), share))
    monkeypatch.setattr(bitwise, "rows_of_shape", lambda *_: Rows(list(differing), list(refused), ways))
    subject = Subject("a", lambda given, is_causal: given[:1], nullcontext, kernels, tuple(SHAPES[:1]))
    result = bitwise.examine(subject, bitwise.QUICK, RIGHT, lambda _: None)
    if result.verdict != NOT_RUN:
        assert result.figures["ways to compute a row"] == (ways * len(inputs.ROW_CLASSES) if ways else 0)
    return result.verdict, result.problems


def each_class(line: str) -> list[str]:
    return [f"{SHAPES[0]} {own}: {line}" for own in inputs.ROW_CLASSES]


def test_rows_of_unlike_classes_are_computed_beside_others() -> None:
    """NaN and Inf are the contract's exception."""
    known = set(inputs.CLASSES) - {"NaN rows", "Inf rows"}
    assert len(inputs.ROW_CLASSES) >= 4 and {*inputs.ROW_CLASSES, *inputs.ROW_CLASSES.values()} <= known
    assert all(own != company for own, company in inputs.ROW_CLASSES.items())


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(monkeypatch) == (PASS, [])
    assert examine(monkeypatch, repeats=("runs",)) == (FAIL, ["runs"])
    assert examine(monkeypatch, differing=("rows",)) == (FAIL, each_class("rows"))
    assert examine(monkeypatch, share=0.2)[0] == INVALID


@pytest.mark.parametrize(
    ("shares", "differ", "share", "tries"),
    [((0.6,), "", 0.6, 1), ((0.3, 0.7), "", 0.7, 2), ((0.3, 0.4), "", 0.4, 2), ((0.3,), "differ", 0.3, 1)],
)
def test_runs_beside_a_load_that_ended_too_early_are_made_again(
    shares: tuple[float, ...], differ: str, share: float, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a longer one, unless something has been found; and as many of each class as there have to be."""
    lengths: list[float] = []
    made: list[tuple[str, int, bool]] = []

    class Load:
        def __init__(self, milliseconds: float) -> None:
            lengths.append(milliseconds)

        def busy_share(self) -> float:
            return shares[len(lengths) - 1]

    def repeat(
        call: Callable[[], tuple[Tensor]],
        names: object,
        runs: int,
        beside: Load | None = None,
        alone: tuple[Tensor, ...] = (),
    ) -> str:
        made.append((classes[int(call()[0])], runs, beside is not None))
        assert alone == (call() if beside else ())
        return differ if beside else ""

    classes = ("zeros", "normal", "large")
    monkeypatch.setattr(bitwise, "Load", Load)
    monkeypatch.setattr(bitwise, "repeat", repeat)
    clock = iter([0.0, 10.0, 12.5, 20.0])  # when the runs of each class begin, those of the second end
    monkeypatch.setattr(bitwise, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    make = lambda name, *_: (torch.tensor(classes.index(name)),)  # noqa: E731
    attend = lambda given, _: given  # noqa: E731
    subject = Subject("a", attend, nullcontext, ("a",), (SHAPES[0],), make=make, classes=classes)
    said = [f"{SHAPES[0]} normal, beside a load: differ"] * bool(differ)
    assert bitwise.repeat_shape(subject, SHAPES[0], bitwise.FULL) == (said, share)
    assert lengths == [2.5, 10.0][:tries]  # milliseconds: a thousand runs took 2.5 s
    alone = [("zeros", 50, False), ("normal", 1000, False), ("large", 50, False)]
    assert made == alone + [("normal", 1000, True)] * tries


def test_the_shape_beside_which_the_load_ran_least_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.9, 0.3, 0.8])
    monkeypatch.setattr(bitwise, "repeat_shape", lambda *_: ([], next(shares)))
    monkeypatch.setattr(bitwise, "rows_of_shape", lambda *_: Rows([], [], 18))
    subject = Subject("a", lambda given, _: given, nullcontext, ("a",), (SHAPES[0], SHAPES[1], SHAPES[0]))
    result = bitwise.examine(subject, bitwise.QUICK, RIGHT, lambda _: None)
    assert result.verdict == INVALID and "30 %" in str(result.as_json())


def test_ours_may_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(monkeypatch, refused=("way",)) == (FAIL, each_class("way"))
    assert examine(monkeypatch, refused=("way",), kernels=()) == (PASS, [])


def test_where_no_row_was_computed_again_there_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = f"{SHAPES[0]}: no row could be computed again: "
    assert examine(monkeypatch, refused=("no",) * 18, kernels=()) == (NOT_RUN, [f"{nothing}no"])
    assert examine(monkeypatch, ways=0) == (NOT_RUN, [f"{nothing}there was no way"])
    found = examine(monkeypatch, repeats=("runs",), ways=0)
    assert found == (FAIL, ["runs", f"{SHAPES[0]}: not run: {nothing.partition(': ')[2]}there was no way"])


def test_memory_that_cannot_be_poisoned_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise WrongMemory("an output does not lie in the memory that was poisoned")

    monkeypatch.setattr(bitwise, "repeat_shape", refuse)
    subject = Subject("a", lambda given, is_causal: given[:1], nullcontext, (), tuple(SHAPES[:1]))
    result = bitwise.examine(subject, bitwise.QUICK, RIGHT, lambda _: None)
    assert result.verdict == NOT_RUN and "does not lie" in result.problems[0]


def test_quick_and_full() -> None:
    assert (bitwise.QUICK.runs, bitwise.FULL.runs) == (100, 1000)


def test_what_the_controls_declare() -> None:
    declared = {path.stem: controls.read_header(path).executing for path in controls.SOURCES.rglob("*.cu")}
    for name in ("atomic_reduction", "uninitialised_workspace", "row_variance"):
        assert declared[name]["bitwise"] == controls.CAUGHT


def test_without_a_gpu_it_is_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in (["--quick"], ["--full"], ["--kernel", "nope"], ["--peer", "sdpa-flash"]):
        assert cli.main(["bitwise", *options]) == 2
        assert "no CUDA GPU" in capsys.readouterr().out


# ---- on the GPU ------------------------------------------------------------------------------------------------------


def test_kernels_of_one_call_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 1, 1, 64, 64, 64, "float16", False)

    def subject(name: str, whole: Subject | None = None) -> Subject:
        return Subject(name, lambda *_: (), nullcontext, (name,), (shape,), whole=(lambda: whole) if whole else None)

    looked_at: list[str] = []

    def examine(call: Subject, *_: object) -> GateResult:
        looked_at.append(call.name)
        return GateResult("bitwise", call.name, FAIL if call.name == "a b" else PASS)

    monkeypatch.setattr(bitwise, "require_gpu", lambda: None)
    monkeypatch.setattr(bitwise, "control_outcomes", lambda *_: [])
    monkeypatch.setattr(bitwise, "examine", examine)
    both = [subject(name, subject("a b")) for name in ("a", "b")]
    results = bitwise.run([both[0], subject("c"), both[1]], True, lambda *_: None)
    assert looked_at == ["a b", "c"]
    assert [(result.subject, result.verdict) for result in results] == [("a", FAIL), ("c", PASS), ("b", FAIL)]


def test_outputs_hold_the_poison_and_another_one_in_each_run(gpu: None) -> None:
    def call() -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(size, dtype=torch.uint8, device="cuda") for size in (10, 2**21, 3 * 2**23 + 1))

    memory = PoisonedBlocks(call())
    for run in (0, 1, 255, 256):
        memory.poison(run)
        outputs = call()
        memory.check(outputs)
        assert all(bool((output == run * 37 % 256).all()) for output in outputs)
        del outputs


def test_all_free_memory_is_taken(session_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of segments as torch cuts them: each request is served from the smallest block that holds it, none anew."""
    random, mib = Random(session_seed), 2**20
    here = {"device": 0, "stream": 0, "segment_pool_id": (0, 0)}
    segments, free = [], {"small": [], "large": []}
    for _ in range(20):
        kind, left = random.choice([("small", 2 * mib), ("large", 20 * mib), ("large", 32 * mib)])
        blocks = []
        while left:
            size = min(left, 512 * random.randint(1, 2048) * random.choice([1, 10]))
            is_free = not (blocks and blocks[-1]["state"] == "inactive") and random.randrange(2) > 0  # else merged
            blocks.append({"size": size, "state": "inactive" if is_free else "active_allocated"})
            free[kind] += [size] * is_free
            left -= size
        segments.append({**here, "segment_type": kind, "blocks": blocks})
    others = [{**segments[0], "stream": 7}, {**segments[0], "segment_pool_id": (0, 1)}, {**segments[0], "device": 1}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*segments, *others])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    for size in free_sizes():
        blocks = free["large" if size > mib else "small"]
        block = min(block for block in blocks if block >= size)
        blocks.remove(block)
        blocks += [block - size] * (block > size)
    assert free["small"] == []
    assert all(size <= mib for size in free["large"])  # which serves no request


@pytest.mark.parametrize("workspace", [2**17 + 512, 2**23])
def test_workspaces_hold_the_poison(gpu: None, workspace: int) -> None:
    """Of a call that takes outputs first, then a workspace that it does not return."""

    def call() -> tuple[torch.Tensor, ...]:
        outputs = [torch.empty(2**22, dtype=torch.uint8, device="cuda") for _ in range(2)]
        scratch = torch.empty(workspace, dtype=torch.uint8, device="cuda")
        return (*outputs, (scratch == scratch[0]).all() & (scratch[0] == memory_byte[0]))

    memory, memory_byte = PoisonedBlocks([torch.empty(2**22, dtype=torch.uint8, device="cuda") for _ in range(2)]), [0]
    for run in range(5):
        memory.poison(run)
        memory_byte[0] = run * 37 % 256
        *_, held = call()
        assert bool(held)


class Allocator:
    """Torch's, as the poison asks it: three blocks are free, and statistics say what is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = torch.zeros(6 * 512, dtype=torch.uint8)
        self.blocks = [self.whole[1024:2048], self.whole[512:1024], self.whole[2560:]]
        kinds = ("reserved_bytes", "allocated_bytes", "active_bytes", "allocation", "active")
        self.current = dict.fromkeys(kinds, 512)
        self.looks = 0
        self.asked: list[list[int]] = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.statistics)
        monkeypatch.setattr(bitwise_memory, "free_sizes", self.free_sizes)
        monkeypatch.setattr(bitwise_memory, "_take", self.take)
        monkeypatch.setattr(bitwise_memory, "_bytes", self.bytes)

    def statistics(self) -> dict[str, dict[str, dict[str, int]]]:
        return {name: {"all": {"current": value}} for name, value in self.current.items()}

    def take(self, sizes: list[int]) -> list[Tensor]:
        self.asked.append(sizes)
        return self.blocks

    def bytes(self, start: int, end: int) -> Tensor:
        first = start - self.whole.data_ptr()
        return self.whole[first : first + end - start]

    def free_sizes(self) -> list[int]:
        self.looks += 1
        return [block.numel() for block in self.blocks]


def test_an_output_in_two_blocks_that_were_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back they are one block, but not where there is a gap between them."""
    whole = Allocator(monkeypatch).whole
    memory = PoisonedBlocks([torch.empty(700)])
    memory.poison(1)
    assert whole.tolist() == [0] * 512 + [37] * 1536 + [0] * 512 + [37] * 512
    memory.check([whole[600:2000], whole[512:2048], whole[2560:]])
    for outside in (whole[500:600], whole[600:2049], whole[2000:2600]):
        for outputs in ([outside], [whole[600:2000], outside], [outside, whole[600:2000]]):
            with pytest.raises(WrongMemory):
                memory.check(outputs)


@pytest.mark.parametrize(
    "changed", ["nothing", "blocks", "reserved_bytes", "allocated_bytes", "active_bytes", "allocation", "active"]
)
def test_what_is_free_is_looked_at_anew_where_something_changed(monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    allocator = Allocator(monkeypatch)
    memory = PoisonedBlocks([torch.empty(700)])
    memory.poison(0)
    reserve, free = allocator.asked
    assert reserve == [3072, *bitwise_memory._WORKSPACE_BYTES] and free == [1024, 512, 512]
    memory.poison(1)
    assert allocator.looks == 1 and allocator.asked[2:] == [free]
    if changed == "blocks":  # another answer to the same requests
        allocator.blocks = [*allocator.blocks[:2], allocator.whole[:512]]
    elif changed != "nothing":
        allocator.current[changed] += 512
    memory.poison(2)
    assert allocator.looks == 1 + (changed != "nothing")
    if changed not in ("nothing", "blocks"):  # what is gone is not asked for: that would be new memory
        assert allocator.asked[3] == reserve
    assert all(bool((block == 74).all()) for block in allocator.blocks)
    memory.check(allocator.blocks)
    memory.poison(3)
    assert allocator.looks == 1 + (changed != "nothing")


def test_memory_that_something_else_gave_back_is_poisoned(gpu: None) -> None:
    """Between two runs, of the size of an output, or new to the allocator."""
    memory = PoisonedBlocks([torch.empty(2**22, dtype=torch.uint8, device="cuda")])
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (2**22, 3 * 2**24)]
    memory.poison(0)
    memory.poison(1)
    for freed in (held[:1], held):
        places = [(block.data_ptr(), block.numel()) for block in freed]
        del held[: len(freed)]
        freed.clear()
        memory.poison(2)
        again = [torch.empty(size, dtype=torch.uint8, device="cuda") for _, size in places]
        memory.check(again)
        assert all(bool((block == 74).all()) for block in again)
        del again


def test_memory_that_was_not_poisoned_is_noticed(gpu: None) -> None:
    before = torch.empty(10, device="cuda")
    memory = PoisonedBlocks([before])
    memory.poison(0)
    with pytest.raises(WrongMemory, match="does not lie"):
        memory.check([before])


@pytest.mark.long
@pytest.mark.parametrize("additions", [1, 20])  # 0.2 ms and 4 ms
def test_the_load_runs_beside(gpu: None, additions: int) -> None:
    load = bitwise_load.Load(0.2 * additions)
    x = torch.zeros(2**26, device="cuda")
    x.add_(1)  # the driver loads a kernel at its first launch, for longer than the fifty take
    torch.cuda.synchronize()
    for _ in range(50):
        load()
        for _ in range(additions):
            x.add_(1)
    assert load.busy_share() > bitwise._LOAD_SHARE


def test_repeat_catches_what_is_left_unwritten(gpu: None) -> None:
    assert repeat(lambda: (torch.zeros(100, device="cuda"),), ["out"], 5) == ""
    assert "4 of 4 runs" in repeat(lambda: (torch.empty(100, device="cuda"),), ["out"], 5)
