"""Plans are counted by their profile, and handed out again until others push them out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mimose
from chains import chain, chains, run
from mimose.costs.input_size import InputSize
from mimose.costs.timeline import Profile, RunCost
from mimose.planning.plan import Plan
from mimose.planning.plan_cache import CachedPlan, PlanCache, Shelved
from mimose.planning.planners import Optimal

PATTERN = ((0, 0), (1, 0), (0, 1))


def plan_of(*recompute: bool, peak_bytes: int = 0) -> Plan:
    return Plan(recompute, peak_bytes, recompute_seconds=0.0, fits=True)


def ready(*recompute: bool, peak_bytes: int = 0) -> CachedPlan:
    pattern = tuple((k, 0) for k in range(len(recompute)))
    return CachedPlan.of(plan_of(*recompute, peak_bytes=peak_bytes), pattern)


def filled(*keys: str, capacity: int = 1024) -> PlanCache:
    cache = PlanCache(capacity)
    for key in keys:
        cache.put(key, ready(False))
    return cache


def keys_in(cache: PlanCache, *keys: str) -> list[str]:
    return [key for key in keys if cache.get(key) is not None]


def test_plan_is_priced_by_its_profile() -> None:
    profile = chain(
        run(saved=100, nanoseconds=2_000), run(saved=50, nanoseconds=3_000), head_forward=40
    )
    plan = Plan.of(profile, (True, False), available_bytes=100)
    assert plan == Plan((True, False), peak_bytes=100, recompute_seconds=2e-6, fits=True)


def test_plan_fits_up_to_the_last_byte() -> None:
    profile = chain(run(saved=100))
    assert Plan.of(profile, (False,), available_bytes=100).fits
    assert not Plan.of(profile, (False,), available_bytes=99).fits


def test_plan_counts_and_shows_what_it_keeps() -> None:
    plan = plan_of(True, False, True, False, False)
    assert plan.kept == 3
    assert str(plan) == "rKrKK"


def test_plan_of_nothing_keeps_nothing() -> None:
    assert plan_of().kept == 0
    assert str(plan_of()) == ""


def test_plan_that_was_put_is_got_again() -> None:
    cache = PlanCache()
    put = CachedPlan.of(plan_of(True, False, True), PATTERN)
    cache.put("key", put)
    assert cache.get("key") is put
    assert put.again == {(0, 0): True, (1, 0): False, (0, 1): True}


def test_plan_for_another_pattern_is_refused() -> None:
    with pytest.raises(ValueError):
        CachedPlan.of(plan_of(True), PATTERN)


def test_plans_handed_out_and_plans_made_are_counted() -> None:
    cache = filled("a")
    for key in ("a", "b", "a"):
        cache.get(key)
    assert (cache.hits, cache.misses) == (2, 1)


def test_newer_plan_replaces_the_older() -> None:
    cache = filled("a")
    newer = ready(True)
    cache.put("a", newer)
    assert cache.get("a") is newer
    assert len(cache) == 1


def test_cache_never_outgrows_its_capacity() -> None:
    cache = filled(*"abcdefgh", capacity=3)
    assert len(cache) == 3
    assert keys_in(cache, *"abcdefgh") == ["f", "g", "h"]


def test_the_plan_not_asked_for_the_longest_goes_first() -> None:
    cache = filled("a", "b", "c", capacity=3)
    cache.get("a")
    cache.put("d", ready(False))
    assert keys_in(cache, "a", "b", "c", "d") == ["a", "c", "d"]


def test_clearing_forgets_plans_and_keeps_counts() -> None:
    cache = filled("a", "b")
    cache.get("a")
    cache.get("z")
    cache.clear()
    assert len(cache) == 0
    assert (cache.hits, cache.misses) == (1, 2)
    assert cache.get("a") is None


@pytest.mark.parametrize("length", [511, 512, 513, 1001])
def test_fixed_size_is_planned_whatever_sizes_may_share_its_plan(length: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(length, length), nn.ReLU()) for _ in range(3)))
    with mimose.auto_checkpoint(model, memory_budget="1GiB") as handle:
        for _ in range(6):
            model(torch.ones(2, length)).sum().backward()
        assert handle.stats().planned_steps > 0


def of_length(length: int) -> InputSize:
    return InputSize((("ids", 2),), (8, length))


def shelved(*plans: tuple[int, int, int, tuple[bool, ...]]) -> PlanCache:
    """Plans by length, with what was available and their peak."""
    cache = PlanCache()
    for length, available, peak_bytes, choices in plans:
        entry = Shelved(of_length(length), available, ready(*choices, peak_bytes=peak_bytes))
        cache.shelve("kind", entry)
    return cache


def shared(cache: PlanCache, length: int, available: int, kind: str = "kind") -> Plan | None:
    cached = cache.between(kind, of_length(length), available)
    return None if cached is None else cached.plan


ONE_OF_TWO = (True, False)


@pytest.fixture
def agreeing() -> PlanCache:
    return shelved((100, 50, 30, ONE_OF_TWO), (200, 45, 40, ONE_OF_TWO))


@pytest.mark.parametrize("available", [50, 45, 40], ids=["more", "as much", "just enough"])
def test_sizes_between_two_with_the_same_choices_have_them_too(
    agreeing: PlanCache, available: int
) -> None:
    plan = shared(agreeing, 150, available)
    assert plan is not None
    assert plan.recompute == ONE_OF_TWO


def test_the_peak_of_a_shared_plan_lies_on_the_line_between_those_that_are_known(
    agreeing: PlanCache,
) -> None:
    peaks = [shared(agreeing, length, 50).peak_bytes for length in (101, 150, 199)]  # type: ignore[union-attr]
    assert peaks == [31, 35, 40]


def test_a_plan_made_for_a_larger_size_alone_says_that_its_peak_is_not_this_ones() -> None:
    cache = shelved((100, 50, 40, (True, False)), (200, 50, 40, (False, False)))
    cached = cache.between("kind", of_length(150), 50)
    assert cached is not None
    assert not cached.exact


@pytest.mark.parametrize(("low", "exact"), [(190, True), (40, False)], ids=["near", "far apart"])
def test_costs_between_sizes_that_lie_far_apart_are_not_taken_for_exact(
    low: int, exact: bool
) -> None:
    cache = shelved((low, 9_000, low * low, ONE_OF_TWO), (200, 40_000, 40_000, ONE_OF_TWO))
    cached = cache.between("kind", of_length(195), 40_000)
    assert cached is None
    cache = shelved((low, 50_000, low * low, ONE_OF_TWO), (200, 40_000, 40_000, ONE_OF_TWO))
    cached = cache.between("kind", of_length(195), 40_000)
    assert cached is not None
    assert cached.plan.peak_bytes >= 195 * 195
    assert cached.exact == exact


def test_a_size_that_was_looked_at_has_its_plan() -> None:
    cache = shelved((100, 50, 30, (False, False)), (101, 50, 40, ONE_OF_TWO))
    plan = shared(cache, 101, 50)
    assert plan is not None
    assert plan.recompute == ONE_OF_TWO


@pytest.mark.parametrize(
    ("length", "available", "kind"),
    [(99, 50, "kind"), (201, 40, "kind"), (150, 39, "kind"), (150, 51, "kind"), (150, 45, "x")],
    ids=["smaller", "larger", "less available", "more available", "another kind"],
)
def test_nothing_is_shared_beyond_what_is_known(
    agreeing: PlanCache, length: int, available: int, kind: str
) -> None:
    assert shared(agreeing, length, available, kind) is None


def test_nothing_is_shared_between_different_choices() -> None:
    cache = shelved((100, 50, 30, (False, False)), (200, 40, 40, ONE_OF_TWO))
    assert shared(cache, 150, 45) is None


def test_smaller_sizes_share_a_plan_that_keeps_everything() -> None:
    cache = shelved((200, 50, 40, (False, False)))
    assert shared(cache, 10, 1000) is not None
    assert shared(cache, 10, 39) is None
    assert shared(cache, 201, 1000) is None


def test_costs_of_a_size_that_is_high_in_one_dimension_alone_are_not_taken_for_exact() -> None:
    cache = PlanCache()
    for rows, length in ((8, 100), (9, 101)):
        size = InputSize((("ids", 2),), (rows, length))
        entry = Shelved(size, 10**6, ready(*ONE_OF_TWO, peak_bytes=rows * length * 10))
        cache.shelve("kind", entry)
    cached = cache.between("kind", InputSize((("ids", 2),), (8, 101)), 10**6)
    assert cached is not None
    assert not cached.exact


@given(profile=chains, budgets=st.tuples(st.integers(0, 2000), st.integers(0, 2000)))
def test_a_shared_plan_is_the_one_that_would_have_been_made(
    profile: Profile, budgets: tuple[int, int]
) -> None:
    low, high = sorted(budgets)
    least, most = (Optimal().plan(profile, available) for available in (low, high))
    if least.recompute == most.recompute and least.fits:
        middle = Optimal().plan(profile, (low + high) // 2)
        assert middle.recompute_seconds == least.recompute_seconds


def _profile(length: int) -> Profile:
    size = InputSize((("x", 1),), (length,))
    return Profile(size, (RunCost(0, 10, 0, 10, 12, 2, 0, 0, nanoseconds=1),), 1, 1)


def test_doubtful_plans_are_forgotten_and_the_others_stay() -> None:
    cache = PlanCache()
    for length, doubtful in ((10, False), (20, False), (30, True)):
        profile = _profile(length)
        plan = Plan.of(profile, (False,), 100)
        cached = CachedPlan.of(plan, ((0, 0),), profile, doubtful=doubtful)
        cache.put((profile.size, 100), cached)
        cache.shelve("kind", Shelved(profile.size, 100, cached))
    assert cache.between("kind", _profile(25).size, 100) is not None
    cache.forget_doubtful()
    assert len(cache) == 2
    assert cache.between("kind", _profile(25).size, 100) is None
    assert cache.between("kind", _profile(15).size, 100) is not None
