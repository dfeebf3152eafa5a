"""A plan carries as far as it fits, and what is found in few looks is exact."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mimose.inputs import InputSize
from mimose.plan import Plan
from mimose.planners import Optimal
from mimose.reach import Line, Stop, last_that_fits, stops
from mimose.shapes import Shape
from mimose.timeline import Profile, RunCost


@given(
    a=st.integers(0, 5),
    b=st.integers(1, 1000),
    limit=st.integers(0, 2_000_000),
    low=st.integers(1, 300),
    width=st.integers(0, 700),
)
def test_the_last_that_fits_is_found_exactly(
    a: int, b: int, limit: int, low: int, width: int
) -> None:
    looks = []

    def excess(x: int) -> int:
        looks.append(x)
        return a * x * x + b * x - limit

    high = low + width
    fitting = [x for x in range(low, high + 1) if a * x * x + b * x <= limit]
    if fitting:
        assert last_that_fits(excess, low, a * low * low + b * low - limit, high) == fitting[-1]
        assert len(looks) <= 12
        assert all(low < x <= high for x in looks)


def test_what_cannot_be_told_is_the_end() -> None:
    assert last_that_fits(lambda _: None, 10, -5, 100) == 10
    assert last_that_fits(lambda x: None if x < 100 else 5, 10, -5, 100) == 10


SIZES = [InputSize((("ids", 2), ("mask", 2)), (8, n, 8, n)) for n in (10, 20, 100)]
SHAPE = Shape.of(SIZES)
RUNS = 4


def profile_of(size: InputSize) -> Profile:
    """Four equal blocks that save the square of the length; the model itself holds its double."""
    n = size.dims[1]
    cost = RunCost(0, n * n, 0, n * n, n * n, 0, 0, 0, 1000 + n)
    return Profile(size, (cost,) * RUNS, 0, 0, prelude=2 * n)


def start_at(n: int, available: int) -> tuple[Line, Stop]:
    size = SHAPE.at(SIZES[0], n)
    profile = profile_of(size)
    plan = Optimal().plan(profile, available)
    return Line(SHAPE, size, n, 100), Stop(profile, available, plan)


def test_sizes_on_a_line_differ_in_all_dimensions_that_vary_together() -> None:
    assert SHAPE.at(SIZES[0], 37).dims == (8, 37, 8, 37)


@given(n=st.integers(10, 100), available=st.integers(100, 50_000))
def test_every_size_up_to_the_last_stop_has_the_same_choices_and_the_next_has_others(
    n: int, available: int
) -> None:
    line, start = start_at(n, available)
    if not start.plan.fits:
        return
    found = stops(line, start, profile_of, Optimal())

    def best(x: int) -> Plan:
        return Optimal().plan(profile_of(SHAPE.at(SIZES[0], x)), available - 2 * (x - n))

    last = max(x for x in range(n, 101) if best(x).recompute == start.plan.recompute)
    for stop in found:
        assert stop.plan.recompute == best(stop.profile.size.dims[1]).recompute
    ends = {stop.profile.size.dims[1] for stop in found}
    expected = {x for x in (last, last + 1) if n < x <= 100}
    assert ends == expected


def test_nothing_is_carried_where_the_times_of_runs_grow_apart() -> None:
    def uneven(size: InputSize) -> Profile:
        profile, n = profile_of(size), size.dims[1]
        slow = profile.runs[0]._replace(nanoseconds=n * n)
        return replace(profile, runs=(slow, *profile.runs[1:]))

    line, start = start_at(50, 6_000)
    assert stops(line, start, profile_of, Optimal())
    mixed = Stop(uneven(line.size), start.available_bytes, start.plan)
    assert stops(line, mixed, uneven, Optimal()) == []
