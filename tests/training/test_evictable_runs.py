"""Which kept activations a step may evict, and when it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_varying_memory import STEPS, Model, Some, no_second_run, peaks_of, words

import mimose
from chains import chain, run
from mimose.costs import Option, Profile, levels
from mimose.estimation import Proportions, Surprise
from mimose.execution import Frame
from mimose.execution.autograd import hooks_are_active
from mimose.interception import Directive
from mimose.memory.meters import CpuMeter
from mimose.training.eviction import StepEvictor
from mimose.training.step import Step

RUNS = [(k, 0) for k in range(4)]


def chain_with_a_large_last_backward() -> Profile:
    usual = run(forward_peak=100, saved=1000, recompute_peak=1000, nanoseconds=1)
    return chain(usual, usual, usual, usual._replace(backward_peak=700))


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
    for key in RUNS:
        evictor.run_begins(key)
    evictor.hold(0, frame)
    assert evictor.look("head", -1, at_head) == bool(unseen)
    assert frame.can_be_evicted == (not unseen)
    meter.close()
    out.sum().backward()


HOOKED: list[bool] = []
"""Whether hooks were active in each forward."""


class Telling(Some):
    """Notes whether hooks see what it saves."""

    def forward(self, rows: torch.Tensor, count: int | None = None) -> torch.Tensor:
        HOOKED.append(hooks_are_active())
        return super().forward(rows, count)


def test_what_need_not_be_evicted_is_kept_as_in_plain_training() -> None:
    """In steps that are not measured, hooks see only what evictable blocks save."""
    torch.manual_seed(0)
    model = Model(Telling, lambda _, few, __: (few,)).train()
    kept, recomputed = peaks_of(model)
    budget = int((kept + recomputed) / 2 / 0.92)
    model.zero_grad()
    by_step = list[int]()
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        for step in range(STEPS):
            HOOKED.clear()
            model.zero_grad()
            loss = model(words(step))
            by_step.append(sum(HOOKED))
            loss.backward()
        assert handle.stats().evictions
    late = by_step[STEPS // 2 :]
    assert any(0 < count < len(model.blocks) for count in late)


FAILS = [False]
"""Whether memory runs out in the next forward."""


class Failing(Some):
    def forward(self, rows: torch.Tensor, count: int | None = None) -> torch.Tensor:
        out = super().forward(rows, count)
        if FAILS[0]:
            FAILS[0] = False
            raise torch.OutOfMemoryError("planned")
        return out


def test_what_need_not_be_evicted_runs_again_even_behind_a_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hook that comes before the forward would run twice if the whole block did."""
    torch.manual_seed(0)
    model = no_second_run(Model(Failing, lambda _, few, __: (few,))).train()
    kept, recomputed = peaks_of(model)
    model.zero_grad()
    failed = 0
    direct = Step.direct

    def fail_if_kept(step: Step, block: int, args: Any, kwargs: Any) -> Directive:
        nonlocal failed
        directive = direct(step, block, args, kwargs)
        kept = directive.option is Option.KEEP and not step.decision.may_evict((block, 0))
        if kept and step.evictor is not None and Surprise.OUT_OF_MEMORY not in step.surprises:
            FAILS[0], failed = True, failed + 1
        return directive

    monkeypatch.setattr(Step, "direct", fail_if_kept)
    budget = int((kept + recomputed) / 2 / 0.92)
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        for step in range(STEPS):
            model.zero_grad()
            model(words(step)).backward()
        assert failed
        assert handle.stats().recoveries == failed
