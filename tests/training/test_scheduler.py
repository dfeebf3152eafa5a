"""The scheduler by itself, on real arithmetic: what it hands out follows what is available."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mimose.costs.input_size import InputSize
from mimose.costs.observations import StepObservation
from mimose.costs.options import Option
from mimose.costs.run_cost import RunCost
from mimose.costs.timeline import Profile, peak
from mimose.memory.meters import CpuMeter, Reading
from mimose.memory.reserve import Reserve
from mimose.planning.plan import Plan
from mimose.planning.planners import Greedy, Optimal, RecomputeAll, Static
from mimose.tensors.gradients import Gradients
from mimose.training.allocator_history import AllocatorHistory
from mimose.training.decision import EVERYTHING, STRICTER, Decision
from mimose.training.host_use import HostUse
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting
from mimose.training.step import Step

RUNS = 6
BUDGET = 14_600_000


def size_of(length: int) -> InputSize:
    return InputSize((("ids", 2),), (8, length))


def seen(length: int, *, allocates: bool = False) -> StepObservation:
    """Equal blocks whose bytes are proportional to the length; no gradients, as in `Bare`."""
    saved = length * 8000

    def run(k: int) -> RunCost:
        return RunCost(
            boundary=saved // 10 if k else 0,
            forward_peak=saved,
            backward_entry=0,
            saved=saved,
            recompute_peak=saved + saved // 4,
            backward_peak=0,
            output_saved=0,
            droppable_input=0,
            nanoseconds=1_000_000,
        )

    return StepObservation(
        pattern=tuple((k, 0) for k in range(RUNS)),
        profile=Profile(size_of(length), tuple(map(run, range(RUNS))), 0, 0, 0, 0),
        gradients_allocated=(0,) * RUNS,
        all_gradients_allocated=0,
        allocates=allocates,
    )


class Bare(Setting):
    """A setting without a model."""

    def __init__(self) -> None:
        self.budget_bytes = BUDGET
        self.reserve = Reserve(BUDGET)
        self.gradients = Gradients([])
        self.meter = CpuMeter()
        self._grain = 1
        self.history = AllocatorHistory(BUDGET, self.meter, self.reserve, reading(0))
        self.host = HostUse(torch.device("cpu"), 0, frozenset(Option))


def reading(in_use: int) -> Reading:
    return Reading(in_use, in_use, in_use, in_use)


@pytest.fixture
def bare() -> Any:
    setting = Bare()
    yield setting
    setting.meter.close()


def knowing(*, allocates: bool = False) -> Scheduler:
    scheduler = Scheduler(Optimal())
    for length in (50, 80, 120, 160, 200, 240, 300):
        scheduler.learn(seen(length, allocates=allocates))
    return scheduler


def decided(scheduler: Scheduler, bare: Bare, length: int, in_use: int = 0) -> Decision:
    return scheduler.decide(bare, size_of(length), reading(in_use), may_evict=True)


def predicted(scheduler: Scheduler, length: int) -> Profile:
    prediction = scheduler.cost_model.predict(size_of(length))
    assert prediction is not None
    return prediction.profile


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_a_plan_is_guarded_by_what_is_available_now(bare: Bare, recomputed: int) -> None:
    scheduler = knowing()
    choices = (True,) * recomputed + (False,) * (RUNS - recomputed)
    needed = Plan.of(predicted(scheduler, 200), choices, 0).peak_bytes
    decision = decided(scheduler, bare, 200, in_use=bare.available(0) - needed)
    assert decision.cached.plan.choices == tuple(map(Option.of, choices))
    assert decision.cached.plan.fits
    assert decision.cached.guarded
    bare.budget_bytes *= 10
    assert not decided(scheduler, bare, 200).cached.guarded


def test_a_plan_from_the_cache_is_as_good_as_a_new_one(bare: Bare) -> None:
    """A plan serves from its own peak to the bytes that it was made for."""
    scheduler, draw, most = knowing(), random.Random(0), bare.available(0)
    for _ in range(800):
        in_use = draw.randrange(10) * most // 10 + draw.randrange(most // 100)
        decision = decided(scheduler, bare, length := draw.choice((200, 240)), in_use)
        best = Optimal().plan(predicted(scheduler, length), decision.available_bytes)
        assert decision.cached.plan.fits == best.fits
        assert decision.cached.plan.extra_seconds == best.extra_seconds
    assert scheduler.cache.hits > 3 * scheduler.cache.misses


def test_a_plan_from_the_cache_fits_where_a_new_one_does(bare: Bare) -> None:
    """Some planners find a plan that fits only where less is available."""
    scheduler, draw, most = Scheduler(Greedy()), random.Random(0), bare.available(0)
    for length in (160, 200, 240, 300):
        scheduler.learn(seen(length))
    fitting = 0
    for _ in range(400):
        in_use = draw.randrange(most)
        for more in (0, most // 400, most // 200):
            decision = decided(scheduler, bare, 200, in_use + more)
            new = Greedy().plan(predicted(scheduler, 200), decision.available_bytes)
            assert decision.cached.plan.peak_bytes <= decision.available_bytes or not new.fits
            fitting += new.fits
    assert fitting > 300


def test_plans_for_all_sizes_change_with_the_static_plan(bare: Bare) -> None:
    scheduler = Scheduler(Static())
    for length in (50, 80, 120, 160, 200, 240, 300):
        scheduler.learn(seen(length))
    bare.budget_bytes = int(0.8 * bare.budget_bytes)
    small, large, again = (decided(scheduler, bare, length) for length in (100, 290, 100))
    assert small.cached.plan.keeps_all
    assert not large.cached.plan.keeps_all
    assert again.cached.plan.choices == large.cached.plan.choices


def test_a_plan_that_keeps_everything_serves_any_greater_room(bare: Bare) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    first = decided(scheduler, bare, 200)
    assert first.cached.plan.keeps_all
    bare.budget_bytes *= 2
    assert decided(scheduler, bare, 200).cached is first.cached


def test_sizes_between_observed_ones_are_planned_for_their_own_costs(bare: Bare) -> None:
    scheduler = knowing()
    available = bare.available(0)
    lengths = list(range(160, 301))
    random.Random(0).shuffle(lengths)
    for length in lengths:
        decision = decided(scheduler, bare, length)
        best = Optimal().plan(predicted(scheduler, length), available)
        assert decision.trusted
        assert not decision.observed
        assert decision.cached.plan == best


def test_a_size_that_comes_again_needs_no_planning(bare: Bare) -> None:
    scheduler = knowing()
    first, again = (decided(scheduler, bare, 170) for _ in range(2))
    assert first.new
    assert not again.new
    assert again.cached is first.cached
    assert (scheduler.cache.misses, scheduler.cache.hits) == (1, 1)


def test_a_size_is_planned_anew_once_more_is_known(bare: Bare) -> None:
    scheduler = knowing()
    decided(scheduler, bare, 170)
    observation, other = seen(180), seen(181)
    assert observation.runs[1].saved != other.runs[1].saved
    scheduler.learn(observation.with_runs(other.runs))
    assert decided(scheduler, bare, 170).new


def test_plans_stay_as_they_are_if_an_observation_is_as_predicted(bare: Bare) -> None:
    scheduler = knowing()
    within, beyond = (decided(scheduler, bare, length) for length in (170, 340))
    assert within.trusted
    assert not beyond.trusted
    scheduler.learn(seen(340))
    assert not decided(scheduler, bare, 170).new
    again = decided(scheduler, bare, 340)
    assert again.new  # now it is trusted, and leaves no room for errors
    assert again.trusted


def test_nothing_is_planned_before_anything_was_observed(bare: Bare) -> None:
    decision = decided(Scheduler(Optimal()), bare, 100)
    assert decision.observed
    assert not decision.cached.choices


@pytest.mark.parametrize("far", [340, 450])
def test_a_size_beyond_those_observed_is_observed_under_eviction(bare: Bare, far: int) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    beyond = decided(scheduler, bare, far)
    assert not beyond.trusted
    assert beyond.observed
    assert beyond.evictable
    assert beyond.cached.plan.fits
    # Blocks are all alike: one shows what they take, and not the first.
    assert str(beyond.cached.plan) == "Kr" + "K" * (RUNS - 2)
    scheduler.learn(seen(far))
    after = decided(scheduler, bare, far)
    assert after.trusted
    assert after.cached.plan.keeps_all


@pytest.mark.parametrize("near", [45, 305])
def test_sizes_that_a_fit_tells_beside_those_observed_are_planned_under_eviction(
    bare: Bare, near: int
) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    beside = decided(scheduler, bare, near)
    assert not beside.trusted
    assert not beside.observed
    assert beside.evictable
    assert beside.cached.plan.keeps_all
    scheduler.learn(seen(near))
    assert decided(scheduler, bare, near).trusted


def test_sizes_that_were_seen_are_not_in_doubt_for_a_larger_one_s_sake(bare: Bare) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    beyond, inside = (decided(scheduler, bare, length) for length in (305, 299))
    assert not beyond.trusted
    assert inside.trusted
    assert not inside.observed
    assert not inside.evictable


class NoOwner:
    def step_over(self, step: Step) -> None:
        pass

    def later_backward_over(self, step: Step) -> None:
        pass


def step_of(scheduler: Scheduler, decision: Decision, length: int) -> Step:
    return Step(
        decision,
        reading(0),
        expected=size_of(length),
        size=size_of(length),
        cost_model=scheduler.cost_model,
        owner=NoOwner(),
    )


def carry_out(
    scheduler: Scheduler,
    bare: Bare,
    decision: Decision,
    length: int,
    *,
    share: float = 1.0,
    limit: int | None = None,
) -> None:
    """A step that does as decided, and rises by this share of what was predicted."""
    step = step_of(scheduler, decision, length)
    for block in range(RUNS):
        step.direct(block, (), {})
    limit = bare.budget_bytes if limit is None else limit
    scheduler.step_over(step, int(share * decision.cached.plan.peak_bytes), limit)


@pytest.mark.parametrize(("length", "recomputes"), [(250, False), (299, True)])
def test_steps_are_observed_once_one_took_more_than_predicted(
    bare: Bare, length: int, recomputes: bool
) -> None:
    """Where a block was recomputed, or near the limit; then everything is recomputed."""
    scheduler = knowing()
    decision = decided(scheduler, bare, length)
    assert decision.trusted
    assert decision.cached.plan.keeps_all is not recomputes
    limit = bare.budget_bytes * (10 if recomputes else 1)
    carry_out(scheduler, bare, decision, length, share=1.05, limit=limit)
    after = decided(scheduler, bare, length)
    assert not after.trusted
    assert after.observed
    assert not after.cached.choices
    scheduler.learn(seen(length))
    assert decided(scheduler, bare, length).trusted


def test_a_peak_far_below_the_limit_is_no_reason_to_observe_while_all_is_kept(bare: Bare) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    decision = decided(scheduler, bare, 250)
    assert decision.cached.plan.keeps_all
    carry_out(scheduler, bare, decision, 250, share=1.05)
    after = decided(scheduler, bare, 250)
    assert after.trusted
    assert not after.observed
    assert after.available_bytes < decision.available_bytes  # room is left for it all the same


@pytest.mark.parametrize("known", [True, False])
def test_what_adds_to_gradients_is_planned_for_a_few_steps_from_what_allocates_them(
    bare: Bare, known: bool
) -> None:
    """And the other way round. Then one is observed, and known by itself."""
    scheduler = knowing(allocates=known)
    parameter = torch.nn.Parameter(torch.zeros(0))
    if known:
        parameter.grad = torch.zeros(0)
    bare.gradients = Gradients([parameter])
    bare.budget_bytes *= 10
    for _ in range(3):
        stood_in = decided(scheduler, bare, 250)
        assert not stood_in.trusted
        assert not stood_in.observed
        assert stood_in.evictable
        assert stood_in.cached.plan.keeps_all
        carry_out(scheduler, bare, stood_in, 250)
    observed = decided(scheduler, bare, 250)
    assert not observed.trusted
    assert observed.observed
    assert observed.cached.plan.count(Option.RECOMPUTE) == 1
    scheduler.learn(seen(250, allocates=not known))
    own = decided(scheduler, bare, 250)
    assert own.trusted
    assert own.cached.plan.keeps_all


def test_of_each_kind_of_block_one_is_recomputed_in_a_step_that_is_observed(bare: Bare) -> None:
    """One that is recomputed anyway will do; a fixed one cannot be."""
    scheduler = Scheduler(Optimal())
    for length in (50, 80, 120, 160, 200, 240, 300):
        observation = seen(length)
        first, *others, last = observation.runs
        larger = [cost._replace(saved=2 * cost.saved) for cost in others[:2]]
        runs = (first._replace(fixed=True), *larger, *others[2:], last._replace(fixed=True))
        scheduler.learn(observation.with_runs(runs))
    bare.budget_bytes *= 10
    beyond = decided(scheduler, bare, 340)
    assert beyond.observed
    assert str(beyond.cached.plan) == "KKrKrK"
    cached = scheduler.cache.get(beyond.key.conditions, beyond.available_bytes)
    assert cached is not None
    assert cached.plan.keeps_all  # the plan itself is as it was
    assert cached.plan.peak_bytes >= beyond.cached.plan.peak_bytes
    for in_use in range(0, bare.available(0), bare.available(0) // 50):
        choices = decided(scheduler, bare, 340, in_use).cached.plan.choices
        assert choices[0] is choices[5] is Option.KEEP
        assert Option.RECOMPUTE in choices[1:3]
        assert Option.RECOMPUTE in choices[3:5]


def test_larger_sizes_are_observed_once_one_ran_out_of_memory(bare: Bare) -> None:
    scheduler = knowing()
    bare.budget_bytes *= 10
    step = step_of(scheduler, decided(scheduler, bare, 250), 250)
    ran_out = reading(0)._replace(failures=1)
    assert scheduler.decide(bare, size_of(250), ran_out, broken=step).observed
    scheduler.learn(seen(130))  # a smaller one says nothing of it
    assert decided(scheduler, bare, 240).trusted
    assert not decided(scheduler, bare, 250).trusted
    assert decided(scheduler, bare, 299).observed
    scheduler.learn(seen(299))
    assert decided(scheduler, bare, 250).trusted


def with_host(scheduler: Scheduler, bare: Bare, length: int, room: int) -> Decision:
    """A decision by costs whose inputs can move, with a link to the host."""
    bare.host = HostUse(torch.device("cpu"), 1 << 30, frozenset(Option))
    return decided(scheduler, bare, length, in_use=bare.available(0) - room)


def knowing_movable() -> Scheduler:
    scheduler = Scheduler(Optimal())
    for length in (50, 80, 120, 160, 200, 240, 300):
        observation = seen(length)
        runs = tuple(
            run._replace(input_movable=run.boundary > 0) for run in observation.profile.runs
        )
        scheduler.learn(replace(observation, profile=replace(observation.profile, runs=runs)))
    return scheduler


def test_the_strictest_plan_moves_inputs_where_recomputing_all_does_not_fit(bare: Bare) -> None:
    scheduler = knowing_movable()
    scheduler.strictness = EVERYTHING
    all_recomputed = RecomputeAll().plan(predicted(scheduler, 200), 0).peak_bytes
    enough = with_host(scheduler, bare, 200, room=all_recomputed).cached.plan
    assert enough.count(Option.RECOMPUTE) == RUNS
    less = with_host(scheduler, bare, 200, room=all_recomputed - 200_000).cached.plan
    assert less.recomputed == RUNS
    assert less.count(Option.RECOMPUTE_FROM_HOST) > 0
    assert less.fits


def test_what_waits_on_the_host_counts_when_the_rest_of_a_step_is_planned(bare: Bare) -> None:
    scheduler = knowing_movable()
    profile = predicted(scheduler, 200)
    room = Plan.of(profile, [True] * 3 + [False] * 3, 0).peak_bytes
    decision = with_host(scheduler, bare, 200, room)
    kept, moved = (
        scheduler.plan_rest(bare, size_of(200), decision, (option,) * 2)
        for option in (Option.KEEP, Option.SAVE_ON_HOST)
    )
    assert kept is not None
    assert moved is not None
    assert moved.plan.peak_bytes == kept.plan.peak_bytes
    assert moved.plan.choices == kept.plan.choices


def test_other_choices_are_those_of_the_plan_that_is_made_of_them(bare: Bare) -> None:
    """The last run's bytes could not leave before the forwards are over: it is kept."""
    scheduler = knowing_movable()
    decision = with_host(scheduler, bare, 200, room=8_000_000)
    everything = dict.fromkeys(decision.cached.choices, Option.SAVE_ON_HOST)
    other = decision.with_choices(everything).cached
    assert other.plan.choices[-1] is Option.KEEP
    assert tuple(other.choices.values()) == other.plan.choices


def varying(length: int, share: float) -> StepObservation:
    """A step whose blocks take some share of what such a length may take."""
    full = seen(length)
    runs = tuple(
        run._replace(
            forward_peak=int(run.forward_peak * share),
            saved=int(run.saved * share),
            recompute_peak=int(run.recompute_peak * share),
        )
        for run in full.runs
    )
    return replace(full, profile=replace(full.profile, runs=runs))


def knowing_that_it_varies() -> Scheduler:
    scheduler, shares = Scheduler(Optimal()), (1.0, 0.3, 0.6)
    for number, length in enumerate(range(100, 300, 15)):
        scheduler.learn(varying(length, shares[number % 3]))
    return scheduler


def test_where_memory_varies_everything_is_kept_until_memory_runs_short(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    decision = decided(scheduler, bare, 250)
    assert decision.cached.plan.keeps_all
    assert not decision.cached.plan.fits
    assert decision.evictable
    assert not decision.trusted


def test_where_memory_varies_and_nothing_can_be_evicted_plans_fit_the_upper_end(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    decision = scheduler.decide(bare, size_of(250), reading(0), may_evict=False)
    assert not decision.evictable
    assert decision.measured  # what it takes raises the upper end
    assert decision.cached.plan.fits
    assert peak(seen(250).profile, decision.cached.plan.choices) <= decision.available_bytes


def test_where_memory_varies_a_plan_that_cannot_fit_is_not_left_to_eviction(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    assert not decided(scheduler, bare, 250, in_use=BUDGET).cached.plan.kept


def test_where_memory_varies_every_eighth_step_is_measured(bare: Bare) -> None:
    scheduler, measured = knowing_that_it_varies(), list[bool]()
    for _ in range(24):
        decision = decided(scheduler, bare, 250)
        measured.append(decision.measured)
        scheduler.step_over(step_of(scheduler, decision, 250), None, BUDGET)
        if decision.measured:
            scheduler.learn(varying(250, 0.5))
    assert [k for k, seen in enumerate(measured) if seen] == [7, 15, 23]


def test_where_memory_varies_and_is_ample_blocks_are_kept_as_in_plain_training(bare: Bare) -> None:
    scheduler, bare.budget_bytes = knowing_that_it_varies(), 100 * BUDGET
    decision = decided(scheduler, bare, 250)
    assert decision.cached.plan.keeps_all
    assert not decision.evictable
    assert not decision.measured
    assert not decision.trusted


def test_where_memory_varies_and_just_suffices_kept_blocks_may_be_evicted(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    expected = decided(scheduler, bare, 250).cached.plan.peak_bytes
    decision = decided(scheduler, bare, 250, in_use=bare.available(0) - int(1.3 * expected))
    assert decision.cached.plan.fits
    assert decision.evictable


def test_kept_runs_may_be_evicted_that_a_plan_for_two_thirds_would_recompute(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    expected = decided(scheduler, bare, 250).cached.plan.peak_bytes
    counts = []
    for share in (0.8, 1.0, 1.2, 1.4):
        decision = decided(scheduler, bare, 250, in_use=bare.available(0) - int(share * expected))
        assert decision.cached.plan.keeps_all
        assert not decision.measured
        cached = decision.cached
        assert cached.profile is not None
        evicted = [Option.of(decision.may_evict(run)) for run in cached.choices]
        assert peak(cached.profile, evicted) <= 0.66 * decision.available_bytes
        counts.append(sum(option.recomputes for option in evicted))
    assert counts == sorted(counts, reverse=True)
    assert RUNS > counts[0] > counts[-1] > 0


def test_everything_kept_may_be_evicted_if_two_thirds_are_not_enough_for_any_plan(
    bare: Bare,
) -> None:
    scheduler = knowing_that_it_varies()
    profile = scheduler.cost_model.predict(size_of(250))
    assert profile is not None
    least = peak(profile.profile_as_run, [Option.RECOMPUTE] * RUNS)
    decision = decided(scheduler, bare, 250, in_use=bare.available(0) - int(1.2 * least))
    assert decision.cached.plan.keeps_all
    assert all(map(decision.may_evict, decision.cached.choices))


def test_everything_kept_may_be_evicted_in_a_measured_step(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    decision = decided(scheduler, bare, 250)
    while not decision.measured:
        scheduler.step_over(step_of(scheduler, decision, 250), None, BUDGET)
        decision = decided(scheduler, bare, 250)
    assert all(map(decision.may_evict, decision.cached.choices))


def test_where_memory_varies_and_is_ample_few_steps_are_measured(bare: Bare) -> None:
    scheduler, bare.budget_bytes = knowing_that_it_varies(), 100 * BUDGET
    measured = list[bool]()
    for _ in range(64):
        decision = decided(scheduler, bare, 250)
        measured.append(decision.measured)
        assert decision.evictable == decision.measured
        scheduler.step_over(step_of(scheduler, decision, 250), None, bare.budget_bytes)
        if decision.measured:
            scheduler.learn(varying(250, 0.5))
    assert [k for k, seen in enumerate(measured) if seen] == [31, 63]


def test_after_a_failure_what_varies_is_planned_by_the_upper_end(bare: Bare) -> None:
    scheduler = knowing_that_it_varies()
    scheduler.strictness = STRICTER
    assert not decided(scheduler, bare, 250).cached.plan.keeps_all
