"""A block compiled with `block.compile()` stays compiled, and no decision compiles it again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from compare import assert_same_gradients
from mimose.attach import Attachment, BlockSeat
from mimose.blocks import find_blocks


class Backend:
    """Compiles by `aot_eager`; counts compilations and runs of what was compiled."""

    def __init__(self) -> None:
        self.compilations = self.runs = 0

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        self.compilations += 1
        compiled = aot_eager(graph, examples)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


class Settable:
    """Recomputes the blocks that it is told to."""

    def __init__(self) -> None:
        self.blocks: tuple[int, ...] = ()

    def recompute(self, seat: BlockSeat, args: Any, kwargs: Any) -> bool:
        return seat.index in self.blocks


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(self.norm(x)).tanh())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Sequential) -> Backend:
    backend = Backend()
    for part in model:
        part.compile(backend=backend)
    return backend


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).pow(2).sum().backward()


PLANS = [(), (0, 1, 2), (0,), (1, 2), ()]


@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_block_runs_compiled_in_the_recompute_and_is_not_compiled_again(
    compile_first: bool,
) -> None:
    model, x = nn.Sequential(Part(), Part(), Part()), torch.randn(2, 8)
    plain, director = copy.deepcopy(model), Settable()
    plain_backend = compiled(plain)
    torch.manual_seed(1)
    for _ in PLANS:
        step(plain, x)
    torch._dynamo.reset()

    if compile_first:
        backend = compiled(model)
        attachment = Attachment(model, find_blocks(model), director)
    else:
        attachment = Attachment(model, find_blocks(model), director)
        backend = compiled(model)
        attachment.take_seats()
    for seat in attachment.seats:
        seat.trusted = True  # no rehearsal, so that every run of the blocks is a step's own
    torch.manual_seed(1)
    for director.blocks in PLANS:
        before = backend.runs
        step(model, x)
        assert backend.runs - before == 3 + len(director.blocks)
    assert backend.compilations == plain_backend.compilations
    assert_same_gradients(model, plain)


def test_first_use_of_a_compiled_block_is_rehearsed_without_compiling_again() -> None:
    model, x = nn.Sequential(Part(), Part(), Part()), torch.randn(2, 8)
    backend, director = compiled(model), Settable()
    step(model, x)
    compilations = backend.compilations
    director.blocks = (0, 1, 2)
    Attachment(model, find_blocks(model), director)
    step(model, x)
    assert backend.compilations == compilations


def test_detaching_leaves_the_block_compiled() -> None:
    model, x = nn.Sequential(Part(), Part()), torch.randn(2, 8)
    backend = compiled(model)
    before = [part._compiled_call_impl for part in model]
    attachment = Attachment(model, find_blocks(model), Settable())
    assert [part._compiled_call_impl for part in model] != before
    attachment.detach()
    assert [part._compiled_call_impl for part in model] == before
    step(model, x)
    assert backend.runs == 2
