"""What is evicted in mid-step does not change what the step teaches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mimose.costs import InputSize, Option, StepObservation
from mimose.estimation import Proportions
from mimose.interception import Attachment, Directive, find_blocks
from mimose.memory import Clock
from mimose.memory.meters import CpuMeter
from mimose.tensors import Gradients, PreviousOutputs
from mimose.training.collector import Collector
from mimose.training.eviction import StepEvictor
from parts import WIDTH, Layer

CPU = torch.device("cpu")
BLOCKS = 4
SIZE = InputSize((("x", 3),), (2, 40, WIDTH))


class EvictsAt(StepEvictor):
    """Evicts all that it can at one moment, and at no other."""

    moment: tuple[str, int] | None = None

    def look(self, where: str, run: int, in_use_bytes: int) -> bool:
        return (where, run) == self.moment and self.make_room()


class Observed:
    """A director that keeps every block, in steps that are observed and may evict."""

    def __init__(self, model: nn.Module, moment: tuple[str, int] | None) -> None:
        self._meter, self._gradients = CpuMeter(), Gradients(model.parameters())
        self._moment = moment

    def step_begins(self) -> None:
        previous, clock = PreviousOutputs(), Clock(CPU)
        self._meter.reset_peak()
        self.collector = Collector(self._meter, clock, self._gradients, previous)
        self._evictor = EvictsAt(self._meter, 0, 0, Proportions(), self.collector)
        self._evictor.moment = self._moment
        self._evictor.follow(None, {})

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        self._evictor.run_begins((block, 0))
        number = self.collector.run_begins((block, 0), args, kwargs, keep=True)
        after = self._head if block == BLOCKS - 1 else None
        return Directive(Option.KEEP, number, self.collector, self._evictor, after=after)

    def _head(self, *_: Any) -> None:
        self.collector.before_head()

    def ran_out(self, block: int) -> None:
        raise AssertionError("there is memory enough")

    def close(self) -> None:
        self._meter.close()


def observed(model: nn.Module, moment: tuple[str, int] | None) -> StepObservation:
    """What the third step shows, of a model in which something is evicted at this moment."""
    model = copy.deepcopy(model)
    director = Observed(model, moment)
    blocks = find_blocks(model, blocks=[str(k) for k in range(BLOCKS)])
    attachment = Attachment(model, blocks, director)
    for _ in range(3):
        model.zero_grad()
        director.step_begins()
        out = model(torch.randn(SIZE.dims, requires_grad=True))
        director.collector.model_returns()
        out.pow(2).mean().backward()
        del out
        director.collector.backward_over(retained=False)
    attachment.detach()
    director.close()
    seen = director.collector.observation(SIZE)
    assert seen is not None
    return seen


def in_bytes(seen: StepObservation) -> list[tuple[int, ...]]:
    """Everything but times; and but the forward peak without keeping, which nothing showed."""
    profile = seen.profile
    runs = [
        run._replace(nanoseconds=0, backward_nanoseconds=0, forward_peak=0) for run in profile.runs
    ]
    return [*map(tuple, runs), (profile.head_forward, profile.head_backward, profile.tail)]


@pytest.mark.parametrize("moment", [("forward", 2), ("head", BLOCKS), ("backward", 3)], ids=str)
def test_a_step_that_evicts_shows_what_one_that_does_not_shows(moment: tuple[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(BLOCKS)))
    assert in_bytes(observed(model, moment)) == in_bytes(observed(model, None))
