"""The cost of plans, and the cache of the most recently used ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import mimose
from chains import chain, run
from mimose.costs.options import Option
from mimose.planning.plan import NO_PLAN, Plan
from mimose.planning.plan_cache import CachedPlan, PlanCache

PATTERN = ((0, 0), (1, 0), (0, 1))
KEEP, AGAIN = Option.KEEP, Option.RECOMPUTE


def plan_of(*again: bool) -> Plan:
    return Plan.of(chain(*[run()] * len(again)), again, 0)


def ready(*again: bool) -> CachedPlan:
    pattern = tuple((k, 0) for k in range(len(again)))
    return CachedPlan.of(plan_of(*again), pattern, chain(*[run()] * len(again)), near_bytes=0)


def filled(*keys: str, capacity: int = 1024) -> PlanCache:
    cache = PlanCache(capacity)
    for key in keys:
        cache.put(key, ready(False))
    return cache


def keys_in(cache: PlanCache, *keys: str) -> list[str]:
    return [key for key in keys if cache.get(key) is not None]


def test_cost_of_a_plan_follows_from_its_profile() -> None:
    profile = chain(
        run(saved=100, nanoseconds=2_000), run(saved=50, nanoseconds=3_000), head_forward=40
    )
    plan = Plan.of(profile, (True, False), available_bytes=100)
    assert plan == Plan((AGAIN, KEEP), peak_bytes=100, extra_seconds=2e-6, fits=True)
    assert plan == Plan.of(profile, (AGAIN, KEEP), available_bytes=100)


def test_plan_fits_up_to_the_last_byte() -> None:
    profile = chain(run(saved=100))
    assert Plan.of(profile, (False,), available_bytes=100).fits
    assert not Plan.of(profile, (False,), available_bytes=99).fits


def test_plan_counts_and_shows_what_it_keeps() -> None:
    plan = plan_of(True, False, True, False, False)
    assert plan.kept == plan.count(KEEP) == 3
    assert plan.count(AGAIN) == 2
    assert not plan.keeps_all
    assert str(plan) == "rKrKK"


def test_plan_that_keeps_all_says_so() -> None:
    assert plan_of(False, False).keeps_all


def test_plan_of_nothing_keeps_nothing() -> None:
    assert plan_of().kept == 0
    assert str(plan_of()) == ""
    assert plan_of().choices == NO_PLAN.choices


def test_cached_plan_is_found_again() -> None:
    cache = PlanCache()
    put = CachedPlan.of(plan_of(True, False, True), PATTERN, chain(*[run()] * 3), near_bytes=0)
    cache.put("key", put)
    assert cache.get("key") is put
    assert put.choices == {(0, 0): AGAIN, (1, 0): KEEP, (0, 1): AGAIN}


def test_plan_for_another_pattern_is_refused() -> None:
    with pytest.raises(ValueError):
        CachedPlan.of(plan_of(True), PATTERN, chain(run()), near_bytes=0)


def test_runs_whose_forward_comes_near_the_limit_are_guarded() -> None:
    """The second begins at 100 and rises by 70, the third begins at 150 and rises by 10."""
    profile = chain(
        run(saved=100, recompute_peak=100),
        run(saved=50, recompute_peak=70),
        run(saved=10, recompute_peak=10),
    )
    plan = Plan.of(profile, [KEEP] * 3, available_bytes=200)
    for near, guarded in [(170, ()), (165, ((1, 0),)), (155, ((1, 0), (0, 1))), (99, PATTERN)]:
        assert CachedPlan.of(plan, PATTERN, profile, near).guarded == set(guarded)


def test_hits_and_misses_are_counted() -> None:
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


def serving(least: int, most: int) -> CachedPlan:
    return replace(ready(False), serves=range(least, most + 1))


def test_a_plan_serves_a_range_of_bytes() -> None:
    cache = PlanCache()
    low, high = serving(10, 20), serving(30, 40)
    cache.put("a", low)
    cache.put("a", high)
    found = [cache.get("a", available) for available in (9, 10, 20, 21, 30, 40, 41)]
    assert found == [None, low, low, None, high, high, None]
    assert (cache.hits, cache.misses) == (4, 2)


def test_a_plan_replaces_those_that_serve_nothing_else() -> None:
    cache = PlanCache()
    for plan in (serving(10, 20), serving(30, 40), serving(10, 25)):
        cache.put("a", plan)
    assert len(cache) == 2
    assert cache.get("a", 40) is not None


def test_of_plans_with_the_same_key_the_oldest_is_dropped_first() -> None:
    cache = PlanCache(3)
    for begin in (10, 20, 30, 40):
        cache.put("a", serving(begin, begin + 5))
    assert [begin for begin in (10, 20, 30, 40) if cache.get("a", begin)] == [20, 30, 40]


def test_cache_never_outgrows_its_capacity() -> None:
    cache = filled(*"abcdefgh", capacity=3)
    assert len(cache) == 3
    assert keys_in(cache, *"abcdefgh") == ["f", "g", "h"]


def test_the_least_recently_used_plan_is_dropped_first() -> None:
    cache = filled("a", "b", "c", capacity=3)
    cache.get("a")
    cache.put("d", ready(False))
    assert keys_in(cache, "a", "b", "c", "d") == ["a", "c", "d"]


def test_clearing_drops_plans_and_keeps_counts() -> None:
    cache = filled("a", "b")
    cache.get("a")
    cache.get("z")
    cache.clear()
    assert len(cache) == 0
    assert (cache.hits, cache.misses) == (1, 2)
    assert cache.get("a") is None


def test_a_model_of_one_size_is_planned() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(513, 513), nn.ReLU()) for _ in range(3)))
    with mimose.auto_checkpoint(model, memory_budget="1GiB") as handle:
        for _ in range(6):
            model(torch.ones(2, 513)).sum().backward()
        assert handle.stats().planned_steps > 0
