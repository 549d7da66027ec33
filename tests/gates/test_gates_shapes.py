"""The shapes that launch the shipped kernels: a gate finds them without a word for a new kernel."""

from __future__ import annotations

from harness import needs_kernels

from dhp_safe_fa.gates import subjects


@needs_kernels
def test_every_shipped_kernel_is_put_under_test() -> None:
    found = subjects.shipped()
    assert [subject.why_not for subject in found] == [""] * len(found)
    assert {len(subject.shapes) for subject in found} == {4}
