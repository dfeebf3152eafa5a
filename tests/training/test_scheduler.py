"""The scheduler by itself, on real arithmetic: what it hands out follows what is available."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from mimose.costs.input_size import InputSize
from mimose.costs.observations import Observation, StepObservation
from mimose.memory.meters import CpuMeter, Reading
from mimose.memory.reserve import Reserve
from mimose.planning.plan import Plan
from mimose.planning.planners import Optimal
from mimose.tensors.gradients import Gradients
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting
from mimose.training.steps import PlannedStep

RUNS = 6
BUDGET = 14_600_000


def size_of(length: int) -> InputSize:
    return InputSize((("ids", 2),), (8, length))


def seen(length: int) -> StepObservation:
    """Equal blocks whose bytes are proportional to the length."""
    saved = length * 8000

    def run(k: int) -> Observation:
        level = k * saved // 10
        return Observation(
            start_bytes=level,
            forward_bytes=level + saved,
            entry_bytes=level,
            born_bytes=0,
            saved_bytes=saved,
            spike_bytes=saved + saved // 4,
            back_bytes=0,
            out_saved_bytes=0,
            in_idle_bytes=0,
            seconds=1e-3,
            fixed=False,
        )

    return StepObservation(
        size=size_of(length),
        pattern=tuple((k, 0) for k in range(RUNS)),
        runs=tuple(map(run, range(RUNS))),
        head_forward_bytes=0,
        head_backward_bytes=0,
        tail_bytes=0,
        prelude_bytes=0,
        gradients_born=False,
    )


class Bare(Setting):
    """A setting without a model."""

    def __init__(self) -> None:
        self.budget_bytes = BUDGET
        self.reserve = Reserve(BUDGET)
        self.gradients = Gradients([])
        self.meter = CpuMeter()
        self._grain = 1
        self._last = reading(0)


def reading(in_use: int) -> Reading:
    return Reading(in_use, in_use, in_use, in_use)


@pytest.fixture
def bare() -> Any:
    setting = Bare()
    yield setting
    setting.meter.close()


def knowing() -> Scheduler:
    scheduler = Scheduler(Optimal())
    for length in (50, 80, 120, 160, 200, 240, 300):
        scheduler.learn(seen(length))
    scheduler.cost_model = scheduler.cost_model.of(born=False)  # as in a step of a `Bare` one
    return scheduler


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_a_shared_plan_is_guarded_by_what_is_available_now(bare: Bare, recomputed: int) -> None:
    scheduler = knowing()
    profile = scheduler.cost_model.predict(size_of(200))
    assert profile is not None
    choices = (True,) * recomputed + (False,) * (RUNS - recomputed)
    needed = Plan.of(profile, choices, 0).peak_bytes
    most = bare.available(0)
    if recomputed:  # one byte less than recomputing one run less would need
        fewer = (*choices[1:], False)
        most = Plan.of(profile, fewer, 0).peak_bytes - 1
    for length in (190, 198, 200):
        scheduler.decide(bare, size_of(length), reading(bare.available(0) - most), 0)
    decision = scheduler.decide(bare, size_of(200), reading(bare.available(0) - needed), 0)
    assert decision is not None
    assert not decision.new
    assert decision.cached.plan.recompute == choices
    assert decision.cached.guarded


def test_sizes_between_two_that_agree_need_no_planning(bare: Bare) -> None:
    scheduler = knowing()
    available = bare.available(0)
    lengths = list(range(160, 301))
    random.Random(0).shuffle(lengths)
    for length in lengths:
        decision = cast(Any, scheduler.decide(bare, size_of(length), reading(0), 0))
        profile = scheduler.cost_model.predict(size_of(length))
        assert profile is not None
        best = Optimal().plan(profile, available)
        assert decision.cached.plan.recompute == best.recompute
        assert decision.cached.plan.peak_bytes == pytest.approx(best.peak_bytes, rel=0.005)
    assert scheduler.cache.misses < len(lengths) // 3


def test_sizes_that_were_seen_are_not_in_doubt_for_a_larger_one_s_sake(bare: Bare) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    beyond = scheduler.decide(bare, size_of(305), reading(0), 0)
    inside = scheduler.decide(bare, size_of(299), reading(0), 0)
    assert beyond is not None
    assert beyond.cached.doubtful
    assert inside is not None
    assert not inside.new
    assert not inside.cached.doubtful


@pytest.mark.parametrize("broken", [True, False])
def test_larger_sizes_are_observed_once_one_took_more_than_predicted(
    bare: Bare, broken: bool
) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    decision = scheduler.decide(bare, size_of(305), reading(0), 0)
    assert decision is not None
    cached = decision.cached
    step = PlannedStep(size_of(305), cached.plan, cached.again, reading(0), lambda _: None)
    step.doubtful = True
    if broken:
        ran_out = reading(0)._replace(failures=1)
        assert scheduler.decide(bare, size_of(305), ran_out, 0, step) is None
    else:
        scheduler.step_over(step, cached.plan.peak_bytes + 1, bare.budget_bytes)
    assert scheduler.decide(bare, size_of(305), reading(0), 0) is None
    assert scheduler.decide(bare, size_of(299), reading(0), 0) is not None
    scheduler.learn(seen(305))
    assert scheduler.decide(bare, size_of(308), reading(0), 0) is not None
