"""How far a plan carries, along the one dimension in which sizes differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mimose.inputs import InputSize
from mimose.plan import Plan
from mimose.planners import Planner
from mimose.shapes import Shape
from mimose.timeline import Profile

_EVEN = 1.02
"""How far the growth of one run's time may differ from another's, at most."""


class Line(NamedTuple):
    """Sizes that differ from one in the only dimension that varies, up to the largest seen."""

    shape: Shape
    size: InputSize
    at: int
    highest: int

    def size_at(self, x: int) -> InputSize:
        return self.shape.at(self.size, x)


class Stop(NamedTuple):
    """A plan for one size on the line, and what it was made from."""

    profile: Profile
    available_bytes: int
    plan: Plan


def stops(
    line: Line,
    start: Stop,
    predict: Callable[[InputSize], Profile | None],
    planner: Planner,
) -> list[Stop]:
    """From a plan that fits: the last size with the same choices, and the plan of the next one.

    Sizes in between have no need of plans of their own, if the times of all runs grow alike: else
    what is the cheapest changes on the way, and nothing is said. What the model itself holds at a
    step's start grows with the size, too, and is taken from what is available.
    """
    seen: dict[int, Stop] = {}

    def excess(x: int) -> int | None:
        profile = predict(line.size_at(x))
        if profile is None:
            return None
        available = start.available_bytes - max(0, profile.prelude - start.profile.prelude)
        plan = Plan.of(profile, start.plan.recompute, available)
        seen[x] = Stop(profile, available, plan)
        return plan.peak_bytes - available

    last = last_that_fits(
        excess, line.at, start.plan.peak_bytes - start.available_bytes, line.highest
    )
    found = [seen[last]] if last in seen else []
    if not all(_in_proportion(start.profile, stop.profile) for stop in found):
        return []
    beyond = seen.get(last + 1)
    if beyond is not None:
        found.append(beyond._replace(plan=planner.plan(beyond.profile, beyond.available_bytes)))
    return found


def _in_proportion(one: Profile, other: Profile) -> bool:
    """Whether the times of all runs are about the same many times longer in the other."""
    pairs = zip(one.runs, other.runs, strict=True)
    times = [(a.nanoseconds, b.nanoseconds) for a, b in pairs if not a.fixed]
    ratios = [b / a for a, b in times if a > 0]
    return len(ratios) == len(times) and max(ratios, default=1) <= _EVEN * min(ratios, default=1)


def last_that_fits(
    excess: Callable[[int], int | None], low: int, excess_at_low: int, high: int
) -> int:
    """The largest number up to `high` without an excess, if `low` has none.

    The excess rises with the number, and about as its square: the line between two known ones says
    where to look next (regula falsi), and where it keeps falling short, half of the way is gone at
    once (the Illinois rule). It takes three or four looks. One that tells nothing is the end.
    """
    if low >= high:
        return low
    above = excess(high)
    if above is None or above <= 0:
        return high if above is not None else low
    below, side = float(excess_at_low), 0
    reach = float(above)
    while high - low > 1:
        guess = low + round((high - low) * -below / (reach - below))
        guess = min(max(guess, low + 1), high - 1)
        found = excess(guess)
        if found is None:
            return low
        if found <= 0:
            low, below = guess, float(found)
            reach = reach / 2 if side < 0 else reach
            side = -1
        else:
            high, reach = guess, float(found)
            below = below / 2 if side > 0 else below
            side = 1
    return low
