"""Training in one rank or several: what a run ended in, and that another one ended in the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import same_bits
from recorded import Call, Recorded
from torch.distributed.tensor import DTensor

STEPS = 20


class Trained(NamedTuple):
    parameters: dict[str, torch.Tensor]
    losses: list[float]
    calls: list[Call]  # of attention, in the first step


def train(model: torch.nn.Module, loss_of: Callable[[int], torch.Tensor]) -> Trained:
    """STEPS optimiser steps; loss_of(step) is the loss before it."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorded = Recorded()
    losses = []
    for step in range(STEPS):
        with recorded if step == 0 else contextlib.nullcontext():
            loss = loss_of(step)
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return Trained(whole_parameters(model), losses, recorded.calls)


def whole_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each as one tensor, however it is sharded, by its name without the wrappers'."""
    found = {}
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()
        found[name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")] = whole
    return found


def twice(train_once: Callable[..., Trained], *arguments: Any) -> Trained:
    """A rank's work: two runs, which end in the same parameters, bit for bit."""
    one, other = train_once(*arguments), train_once(*arguments)
    assert one.losses == other.losses
    assert_same_parameters(one, other)
    return one


def assert_same_parameters(one: Trained, other: Trained) -> None:
    assert one.parameters.keys() == other.parameters.keys()
    for name, parameter in one.parameters.items():
        assert same_bits(parameter, other.parameters[name]), name


def assert_same_training(ranks: list[Trained], alone: Trained, tolerance: float) -> None:
    """The ranks hold the same parameters; their mean losses are those of one process, up to rounding, and fall."""
    assert alone.losses[-1] < 0.8 * alone.losses[0]
    for rank in ranks[1:]:
        assert_same_parameters(ranks[0], rank)
    for step, want in enumerate(alone.losses):
        loss = sum(rank.losses[step] for rank in ranks) / len(ranks)
        assert abs(loss - want) <= tolerance * want, f"step {step}: loss {loss}, in one process {want}"
