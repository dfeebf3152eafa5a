"""Loops that catch the error themselves and go on: memory runs out once, not again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mimose

MIB = 1 << 20


class Block(nn.Module):
    """Saves so many tensors of its input's size."""

    def __init__(self, saved: int) -> None:
        super().__init__()
        self.inner, self.saved = nn.Linear(32, 32), saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        for _ in range(self.saved):
            y = torch.sin(y)
        return x + y


class Net(nn.Module):
    def __init__(self, saved: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(saved) for _ in range(8))
        self.head_tensors = 0

    def save(self, tensors: int) -> None:
        for block in self.blocks:
            block.saved = tensors

    def forward(self, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.stem(y if x is None else x)
        for block in self.blocks:
            out = block(out)
        for _ in range(self.head_tensors):
            out = torch.sin(out)
        return out


class Loop:
    """Training under a hard limit that goes on after a failure."""

    def __init__(self, model: nn.Module, mebibytes: float, planner: str = "optimal") -> None:
        torch.manual_seed(0)
        self.model = model
        self.handle = mimose.auto_checkpoint(
            model, int(mebibytes * MIB), planner=planner, enforce=True
        )
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.failures = 0

    def step(
        self, *args: Any, loss_of: Callable[[Any], torch.Tensor] | None = None, **kw: Any
    ) -> None:
        try:
            out = self.model(*args, **kw)
            (loss_of(out) if loss_of else out.pow(2).mean()).backward()
            self._optimizer.step()
        except torch.OutOfMemoryError:
            self.failures += 1
        self._optimizer.zero_grad()

    @property
    def observed(self) -> int:
        return self.handle.stats().observed_steps


@pytest.fixture
def loops() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(*args: Any, **options: Any) -> Loop:
        made.append(Loop(*args, **options))
        return made[-1]

    yield make
    for loop in made:
        loop.handle.detach()


def test_what_fails_under_one_layout_is_looked_at_there(loops: Any) -> None:
    model = Net()
    loop = loops(model, 4)
    for i in range(40):
        name = "xy"[i % 2]
        model.save(8 if name == "y" and i >= 16 else 2)
        loop.step(**{name: torch.randn(1024, 32)})
    assert loop.failures == 1
    assert loop.observed <= 8


def test_what_fails_in_one_regime_is_looked_at_there(loops: Any) -> None:
    model = Net()
    loop = loops(model, 4)
    for i in range(40):
        model.blocks[0].requires_grad_(i % 2 == 0)
        model.save(8 if i % 2 == 0 and i >= 16 else 2)
        loop.step(torch.randn(1024, 32))
    assert loop.failures == 1
    assert loop.observed <= 8


def test_what_fails_at_one_size_is_looked_at_there(loops: Any) -> None:
    model = Net()
    loop = loops(model, 4)
    for i in range(60):
        rows = 1024 if i % 4 == 3 else 256
        model.save(8 if rows == 1024 and i >= 16 else 2)
        loop.step(torch.randn(rows, 32))
    assert loop.failures == 1
    assert loop.observed <= 8


def test_memory_that_goes_up_and_down_fails_once_for_each_rise(loops: Any) -> None:
    model = Net()
    loop = loops(model, 5)
    for tensors, steps in ((2, 6), (5, 8), (2, 8), (18, 20)):
        model.save(tensors)
        for _ in range(steps):
            loop.step(torch.randn(1024, 32))
    assert loop.failures <= 2


def test_a_step_observed_in_part_that_fails_is_seen_whole_the_next_time(loops: Any) -> None:
    failures = {}
    for planner in ("recompute_all", "optimal"):
        model = Net()
        loop = loops(model, 4, planner=planner)
        for rows in (100, 200, 300, 400, 450, 700, 730, 760, 790, 820):
            model.head_tensors = 16 if rows > 500 else 0
            loop.step(torch.randn(rows, 32))
        failures[planner] = loop.failures
    assert failures["recompute_all"] == 0
    assert failures["optimal"] <= 1


def test_batches_that_cannot_fit_do_not_make_the_reserve_grow(loops: Any) -> None:
    loop = loops(Net(), 3)
    for i in range(48):
        loop.step(torch.randn(20_000 if i % 8 == 7 else (500, 600, 700, 800)[i % 4], 32))
    stats = loop.handle.stats()
    assert loop.failures == 6
    assert stats.reserve_bytes == pytest.approx(0.03 * stats.budget_bytes, rel=0.01)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(3) for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = b = self.stem(x)
        for block in self.blocks[:4]:
            a = block(a)
        for block in self.blocks[4:]:
            b = block(b)
        return a, b


@pytest.mark.parametrize("planner", ["optimal", "recompute_all"])
def test_a_branch_that_the_loss_does_not_always_use_can_still_be_recomputed(
    loops: Any, planner: str
) -> None:
    loop = loops(Branches(), 1.5, planner=planner)
    losses = [lambda out: out[0].pow(2).mean(), lambda out: (out[0] * out[1]).pow(2).mean()]
    for i in range(40):
        loop.step(torch.randn((400, 330, 470)[i % 3], 32), loss_of=losses[i % 2])
    assert loop.failures <= (planner == "optimal")  # the first time that it uses both
    assert loop.handle.stats().runs_recomputed > 0


@pytest.mark.parametrize("at", [1, 2, 10])
def test_a_batch_that_is_given_up_while_its_loss_lives_spoils_nothing(loops: Any, at: int) -> None:
    model = Net()
    loop = loops(model, 2)
    for i in range(30):
        if i == at:
            held = model(torch.randn(512, 32)).mean()  # no backward, and alive in the next forward
        else:
            loop.step(torch.randn((512, 400, 300, 460)[i % 4], 32))
            held = None
    assert held is None
    assert loop.failures <= 1  # two graphs at once
    assert loop.observed <= 9


def test_two_passes_after_many_single_ones_fail_no_more_than_once(loops: Any) -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, passes: int = 1) -> torch.Tensor:  # type: ignore[override]
            return torch.stack([super(Twice, self).forward(x) for _ in range(passes)]).sum(0)

    loop = loops(Twice(), 3)
    for i in range(200):
        twice = i in (3, 5, 7, 9, 80, 150, 199)
        loop.step(torch.randn(512, 32), passes=2 if twice else 1)
    assert loop.failures <= 1


def test_a_block_too_large_to_be_tried_is_recomputed_all_the_same(loops: Any) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__(16)
            self.blocks = self.blocks[:2]

    loop = loops(Two(), 3.6)
    for _ in range(2):
        loop.step(torch.randn(1000, 32))
    with pytest.warns(mimose.MimoseWarning, match="too large to be tried"):
        loop.step(torch.randn(1000, 32))
    for _ in range(4):
        loop.step(torch.randn(1000, 32))
    assert loop.failures == 0
    assert loop.observed <= 4
