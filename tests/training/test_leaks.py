"""A thousand steps leave tensors, hooks and modules as they were, also when every third raises."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mimose
import models
from compare import Storages, live_tensors, no_hooks
from mimose.interception.attachment import RECOMPUTE_EVERYTHING, Attachment
from mimose.interception.blocks import find_blocks
from parts import FailsInBackward, Faulty, Layer, bf16

STEPS = 1000
FAULTS = ("forward", "recompute", "backward")


def faulty() -> nn.Sequential:
    return nn.Sequential(Faulty(), Faulty(), Faulty())


def phases(raising: bool) -> list[str]:
    """What goes wrong in each step: nothing, or in every third something, by turns."""
    faults = itertools.cycle(FAULTS)
    return [next(faults) if raising and step % 3 == 2 else "none" for step in range(STEPS)]


def steps(model: nn.Sequential, x: torch.Tensor, phases: list[str]) -> Iterator[tuple[str, float]]:
    """Train, with the fault in the middle block; tell after each step how it ended."""
    torch.manual_seed(1)
    for step, model[1].phase in enumerate(phases):
        model.zero_grad()
        ended = "none"
        try:
            if step % 2:
                loss = model(x).sum()
            else:
                with bf16():
                    loss = model(x).float().sum()
            loss.backward()
        except ValueError:
            ended = model[1].phase
        assert no_hooks()
        yield ended, torch.rand(1).item()  # where the stream of random numbers has got to
    model.zero_grad()


def first_steps(model: nn.Sequential, x: torch.Tensor) -> None:
    """What is made once: the first use of each block, caches of the library."""
    for _ in steps(model, x, ["none", "none", *FAULTS]):
        pass


def modules(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(module.__dict__) for module in model.modules()]


@pytest.mark.parametrize("raising", [False, True])
def test_a_thousand_steps_leave_nothing_behind(raising: bool) -> None:
    attached, x = faulty(), torch.randn(3, 4)
    plain = copy.deepcopy(attached)
    todo = phases(raising)
    expected = [draw for _, draw in steps(plain, x, todo)]
    Attachment(attached, find_blocks(attached, blocks=["0", "1", "2"]), RECOMPUTE_EVERYTHING)
    buffers = copy.deepcopy(list(attached.buffers()))
    first_steps(attached, x)
    attached[1].phase = todo[-1]
    for buffer, value in zip(attached.buffers(), buffers, strict=True):
        buffer.copy_(value)
    tensors, inside = live_tensors(), modules(attached)
    ended, draws = zip(*steps(attached, x, todo), strict=True)
    assert list(ended) == todo
    assert list(draws) == expected
    assert live_tensors() <= tensors
    assert modules(attached) == inside
    for ours, theirs in zip(attached.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("raising", [False, True])
def test_no_memory_is_held_where_python_cannot_see_it(raising: bool) -> None:
    attached, x = faulty(), torch.randn(3, 4)
    Attachment(attached, find_blocks(attached, blocks=["0", "1", "2"]), RECOMPUTE_EVERYTHING)
    first_steps(attached, x)
    with Storages(attached, x) as storages:
        for _ in steps(attached, x, phases(raising)[:30]):
            pass
        assert storages.live() == 0


class EndsInRelu(nn.Module):
    """Saves its own output, which the next block is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (FailsInBackward.apply(x) if self.fails else x).relu()


def test_an_observed_step_whose_backward_fails_leaves_nothing_behind() -> None:
    attached, x = nn.Sequential(*(EndsInRelu() for _ in range(4))), torch.randn(3, 4)
    with (
        mimose.auto_checkpoint(
            attached, "1GiB", blocks=EndsInRelu, planner="recompute_all"
        ) as handle,
        Storages(attached, x) as storages,
    ):
        for attached[2].fails in (False, True, True, False):
            with suppress(ValueError):
                attached(x).sum().backward()
            assert handle._engine._now.last.observed
        assert handle._engine._now.last.over
        attached.zero_grad()
        assert storages.live() == 0


def test_hooks_that_refer_to_their_own_nodes_hold_nothing_of_a_recompute() -> None:
    attached, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(2, 5, 16)
    Attachment(attached, find_blocks(attached, blocks=Layer), RECOMPUTE_EVERYTHING)
    with FlopCounterMode(display=False), Storages(attached, x) as storages:
        for _ in range(3):
            attached(x).sum().backward()
            attached.zero_grad()
        assert storages.live() == 0


def test_attaching_again_and_again_leaves_nothing_of_a_handle_behind() -> None:
    attached, x = faulty(), torch.randn(3, 4)
    handle = mimose.auto_checkpoint(attached, "1GiB", blocks=["0", "1", "2"])
    handle.retry(lambda: attached(x).sum().backward())
    settings = weakref.ref(handle._engine.setting), weakref.ref(handle._engine._rewind_store)
    handle.detach()
    del handle
    gc.collect()
    assert [ref() for ref in settings] == [None, None]


@pytest.mark.parametrize("steps", [0, 4])
def test_a_handle_that_is_kept_does_not_keep_its_model_alive(steps: int) -> None:
    model = models.Encoder()
    handle = mimose.auto_checkpoint(model, "1GiB")
    for length in range(20, 20 + steps):
        model(torch.randint(0, 50, (2, length))).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    handle.detach()


class Changing(nn.Module):
    """Gives something else each time, so that it cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(self.calls)


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("case", ["none", "forward", "backward", "cannot be recomputed"])
def test_detached_handle_holds_nothing_of_a_model_that_is_gone(case: str, steps: int) -> None:
    block: type[nn.Module] = Changing if case == "cannot be recomputed" else Faulty
    attached = nn.Sequential(block(), block(), block())
    handle = mimose.auto_checkpoint(attached, "1GiB", blocks=block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mimose.errors.MimoseWarning)
        for step in range(steps):
            attached[1].phase = case if step == steps - 1 else "none"
            with suppress(ValueError):
                attached(torch.randn(3, 4)).sum().backward()
    handle.detach()
    gradients = [p.grad for p in attached.parameters() if p.grad is not None]
    things = [*attached.modules(), *attached.parameters(), *attached.buffers(), *gradients]
    left = [weakref.ref(thing) for thing in things]
    del attached, gradients, things
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)
    assert handle.stats().steps == steps
