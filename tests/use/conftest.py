"""What tests of policies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dhp_safe_fa


@pytest.fixture
def no_policy_left() -> Iterator[None]:
    """Nothing compiled before, no gradients recorded, and no policy set for the tests that follow."""
    torch.compiler.reset()
    with torch.no_grad():
        yield
    dhp_safe_fa.set_policy(None)
