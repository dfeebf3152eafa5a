"""Whoever observes a block hears of its recompute and its backward, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mimose.execution.autograd import ForwardEnd, Listener
from mimose.interception.attachment import Attachment
from mimose.interception.blocks import find_blocks
from parts import Only, Overheard

Event = tuple[str, int]


class Diary(Listener):
    """Writes down all that it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def before_recompute(self, run: int) -> None:
        self.events.append(("before", run))

    def after_recompute(self, run: int) -> None:
        self.events.append(("after", run))

    def backward_begins(self, run: int) -> None:
        self.events.append(("begins", run))

    def backward_ends(self, run: int) -> None:
        self.events.append(("ends", run))


def attach(model: nn.Module, listener: Listener, *recomputed: int) -> None:
    """Each call is told by its block's index, and is kept unless it is one of `recomputed`."""
    Attachment(model, find_blocks(model), Overheard(Only(*recomputed), listener))


class Part(nn.Module):
    """A block of one output, or of two."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x).sin()
        return x.exp() if self.outputs == 1 else (x, x.exp())


class Chain(nn.Module):
    """Three blocks; of two outputs each, the next takes the sum."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(outputs) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            out = part(x)
            x = out if part.outputs == 1 else torch.add(*out)
        return x


LEAF = torch.ones(2, 4, requires_grad=True)
INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "computed": lambda: LEAF * 2,
    "a leaf": lambda: torch.ones(2, 4, requires_grad=True),
    "the same leaf again": lambda: LEAF,
    "without gradient": lambda: torch.ones(2, 4),
}


def heard(
    recomputed: tuple[int, ...], model: Chain, give: Callable[[], torch.Tensor], backwards: int = 1
) -> list[Event]:
    """What is heard in the second step: in the first one, blocks are rehearsed."""
    diary = Diary()
    attach(model, diary, *recomputed)
    model(give()).sum().backward()
    diary.events.clear()
    loss = model(give()).sum()
    assert not diary.events
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    return diary.events


def expected(recomputed: tuple[int, ...]) -> list[Event]:
    return [
        (event, block)
        for block in (2, 1, 0)
        for event in ["begins", *(["before", "after"] if block in recomputed else []), "ends"]
    ]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("recomputed", [(0, 1, 2), (), (0, 2), (1,)])
def test_each_block_is_heard_from_its_beginning_to_its_end(
    recomputed: tuple[int, ...], given: str, outputs: int
) -> None:
    assert heard(recomputed, Chain(outputs), INPUTS[given]) == expected(recomputed)


@pytest.mark.parametrize("given", ["computed", "a leaf", "without gradient"])
def test_every_backward_through_a_retained_graph_is_heard(given: str) -> None:
    events = heard((0, 1, 2), Chain(), INPUTS[given], backwards=2)
    assert events == expected((0, 1, 2)) * 2


def test_listening_leaves_no_hook_on_the_input() -> None:
    leaf = torch.ones(2, 4, requires_grad=True)
    heard((0, 1, 2), Chain(), lambda: leaf)
    assert not leaf._backward_hooks


def test_end_is_told_when_the_gradients_of_the_block_are_there() -> None:
    model, grads = Chain(), {}

    class Looks(Listener):
        def backward_ends(self, run: int) -> None:
            grads[run] = [p.grad is not None for p in model.parts[run].parameters()]

    attach(model, Looks(), 0, 1, 2)
    model(torch.ones(2, 4)).sum().backward()
    assert grads == {block: [True, True] for block in range(3)}


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square()


class Scales(nn.Module):
    """Passes on what it is given, and saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * by, by


def test_what_a_block_passes_through_is_not_its_own_output() -> None:
    told = []

    class Hears(Listener):
        def forward_ends(self, run: int, end: ForwardEnd) -> None:
            told.append((len(end.outputs), end.saved_outputs))

    model = nn.Sequential(Scales(), Scales())
    attach(model, Hears(), 0)
    for _ in range(2):
        by = torch.ones(2, 4, requires_grad=True) * 2
        out, passed = model[0](torch.ones(2, 4, requires_grad=True), by)
        assert passed is by
        out.sum().backward()
    assert told == [(1, []), (1, [])]


def test_forward_tells_how_much_of_its_output_it_would_have_saved() -> None:
    told = {}

    class Hears(Listener):
        def forward_ends(self, run: int, end: ForwardEnd) -> None:
            told[run] = sum(tensor.untyped_storage().nbytes() for tensor in end.saved_outputs)

    model = nn.Sequential(Part(1), Squares(), Part(1))
    attach(model, Hears(), 0, 1)
    for _ in range(2):
        told.clear()
        model(torch.ones(2, 4)).sum().backward()
        # exp saves its result, square its argument; the last block is kept
        assert told == {0: 2 * 4 * 4, 1: 0, 2: 2 * 4 * 4}
