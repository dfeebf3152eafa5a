"""Which kept activations a step may evict, and when it does."""

from __future__ import annotations

import pytest
import torch
from test_varying_memory import STEPS, Model, Some, peaks_of, words
from torch import nn

import mimose
from mimose.costs import Option, Profile, RunCost, levels
from mimose.estimation import Proportions
from mimose.execution import Frame
from mimose.execution.autograd import hooks_are_active
from mimose.memory.meters import CpuMeter
from mimose.training.eviction import StepEvictor

RUNS = [(k, 0) for k in range(4)]


def chain_with_a_large_last_backward() -> Profile:
    run = RunCost(
        boundary=0,
        forward_peak=100,
        backward_entry=0,
        saved=1000,
        recompute_peak=1000,
        backward_peak=0,
        output_saved=0,
        droppable_input=0,
        nanoseconds=1,
    )
    last = run._replace(backward_peak=700)
    return Profile((), (run, run, run, last), 0, 0, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("unseen", [(), (RUNS[3],)], ids=["seen", "unseen"])
def test_before_the_head_room_is_made_for_backwards_at_which_nobody_looks(
    unseen: tuple[tuple[int, int], ...],
) -> None:
    profile = chain_with_a_large_last_backward()
    choices = [Option.KEEP] * 4
    at_head = levels(profile, choices)[1]
    meter = CpuMeter()
    evictor = StepEvictor(meter, 0, at_head + 100, Proportions(), None)
    evictor.follow(profile, dict(zip(RUNS, choices, strict=True)), unseen)
    weight = torch.ones(300, requires_grad=True)
    frame = Frame(lambda x: torch.sin(2 * x), (weight,), {}, keeping=True)
    out = frame.forward((weight,), {})
    frame.evictable = True
    for run in RUNS:
        evictor.run_begins(run)
    evictor.hold(0, frame)
    assert evictor.look("head", -1, at_head) == bool(unseen)
    assert frame.can_be_evicted == (not unseen)
    meter.close()
    out.sum().backward()


class Outer(nn.Module):
    """A block around another module, inside of which its hooks run."""

    def __init__(self) -> None:
        super().__init__()
        self.some = Some()

    def forward(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        out: torch.Tensor = self.some(rows, count)
        return out


def test_what_need_not_be_evicted_is_kept_as_in_plain_training() -> None:
    """In steps that are not measured, hooks see only what evictable blocks save."""
    torch.manual_seed(0)
    model = Model(Outer, lambda _, few, __: (few,)).train()
    kept, recomputed = peaks_of(model)
    budget = int((kept + recomputed) / 2 / 0.92)
    model.zero_grad()
    hooked, by_step = list[bool](), list[int]()
    for block in model.blocks:
        block.some.register_forward_hook(lambda *_: hooked.append(hooks_are_active()))
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        for step in range(STEPS):
            hooked.clear()
            model.zero_grad()
            model(words(step)).backward()
            by_step.append(sum(hooked))
        assert handle.stats().evictions
    late = by_step[STEPS // 2 :]
    assert any(0 < count < len(model.blocks) for count in late)
