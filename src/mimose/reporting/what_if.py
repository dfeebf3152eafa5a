"""What-if forecasts: time and memory under other budgets and lengths, without training.

The costs of each size come from a recording or a saved state_dict, the plan for each size and
budget from a planner. Averages are weighted by how often each size occurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.costs import InputSize, Option, Profile, peak
from mimose.errors import ArgumentError
from mimose.estimation import Prediction, Shape
from mimose.reporting.outlook import Outlook

_FAR = 64
"""How far to extrapolate at most, as a multiple of the longest recorded length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The forecast for one budget."""

    budget_bytes: int
    step_seconds: float | None
    """Mean time of a step; None if the file has no step times."""
    recompute_seconds: float
    """Mean time of recomputing in a step; part of `step_seconds`."""
    recomputed_share: float
    """Share of block runs that are recomputed."""
    too_large_share: float
    """Share of steps that do not fit even with everything recomputed."""
    too_large_range: tuple[float, float]
    """Lower and upper limit of `too_large_share`, given the uncertainty of extrapolated peaks."""
    largest: Reach | None
    """The longest input that fits at the most common batch size."""
    largest_batch: int | None
    """Approximate largest batch that fits at the largest input size."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The longest input that fits."""

    length: int
    extrapolated: bool
    """Whether it is longer than any recorded input, and therefore approximate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One row per budget, and the smallest and largest budget of interest."""

    rows: tuple[Row, ...]
    least_budget_bytes: int
    """Below this budget the largest input does not fit even with everything recomputed."""
    easy_budget_bytes: int
    """From this budget on, nothing is recomputed."""
    largest: str
    """The largest input size whose costs can be predicted."""
    uncertainty: float
    """Relative uncertainty of these two budgets; 0 without extrapolation."""
    sizes: int
    extrapolated_share: float
    """Share of steps larger than any recorded one; their costs are extrapolated."""
    unknown_share: float
    """Share of steps whose costs cannot be predicted; excluded from times and shares of runs."""
    dimension: str | None
    """The input shape with n in place of `Reach.length`."""


class Lengths:
    """Converts a length to an input size of the recorded run."""

    def __init__(self, sizes: Sequence[InputSize]) -> None:
        layout = Counter(size.layout for size in sizes).most_common(1)[0][0]
        self._sizes = [size for size in sizes if size.layout == layout]
        self._shape = Shape.of(list(dict.fromkeys(self._sizes)))
        free = [i for i in range(len(self._shape.symbols)) if not self._is_batch(i)]
        self._free = free[0] if len(free) == 1 else None
        self._usual = Counter(self._sizes).most_common(1)[0][0]
        self.batch = self._usual.dims[0] if self._usual.dims else 1

    def _is_batch(self, symbol: int) -> bool:
        return len(self._shape.symbols) > 1 and self._shape.symbols[symbol][0].position == 0

    @property
    def one_way(self) -> bool:
        """Whether only one dimension varies besides the batch."""
        return self._free is not None

    @property
    def pattern(self) -> str | None:
        """The most common size with n for the dimension that varies."""
        if self._free is None:
            return None
        varies = {member.position for member in self._shape.symbols[self._free]}
        shown = ["n" if i in varies else str(d) for i, d in enumerate(self._usual.dims)]
        at = 0
        for _, rank in self._shape.layout:
            if varies & set(range(at, at + rank)):
                return "×".join(shown[at : at + rank])
            at += rank
        return "n"

    def at(self, length: int) -> InputSize:
        """The most common size, with this length."""
        if self._free is None:
            raise ArgumentError(
                "the recorded inputs vary in several dimensions, so a length does not determine "
                "their size: omit the lengths to use the recorded sizes"
            )
        dims = list(self._usual.dims)
        for member in self._shape.symbols[self._free]:
            dims[member.position] = round(member.slope * length + member.offset)
        return InputSize(self._shape.layout, tuple(dims))

    def of(self, size: InputSize) -> int:
        assert self._free is not None
        return size.dims[self._shape.symbols[self._free][0].position]

    @property
    def longest(self) -> int:
        assert self._free is not None
        return max(self.of(size) for size in self._sizes)


def forecast(
    outlook: Outlook,
    weights: Mapping[InputSize, float],
    budgets: Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> Forecast:
    """Forecast each budget for steps of these sizes and relative frequencies."""
    estimates = {size: outlook.extrapolate(size) for size in weights}
    known = {size: estimate for size, estimate in estimates.items() if estimate is not None}
    if not known:
        raise ArgumentError(
            "the costs of these sizes cannot be predicted: record more steps (about ten, of "
            "different sizes)"
        )
    total = sum(weights.values())
    shares = {size: weights[size] / total for size in known}
    profiles = {size: estimate.profile for size, estimate in known.items()}
    largest = max(known, key=lambda size: outlook.easy_budget(profiles[size]))
    least = max(map(outlook.least_budget, profiles.values()))
    easy = max(map(outlook.easy_budget, profiles.values()))
    budgets = budgets or _spread(least, easy, outlook.budget_bytes)
    return Forecast(
        rows=tuple(_row(outlook, known, shares, b, profiles[largest], lengths) for b in budgets),
        least_budget_bytes=least,
        easy_budget_bytes=easy,
        largest=str(largest),
        uncertainty=known[largest].uncertainty,
        sizes=len(known),
        extrapolated_share=sum(shares[s] for s in known if outlook.cost_model.beyond(s)),
        unknown_share=sum(weights[s] for s in weights if s not in known) / total,
        dimension=lengths.pattern if lengths else None,
    )


def _spread(least: int, easy: int, recorded: int | None) -> list[int]:
    """Budgets from all recomputed to all kept, with the recorded one if it is in that range."""
    spread = [int(least + share * (easy - least)) for share in (0, 0.1, 0.25, 0.5, 0.75, 1)]
    return sorted({*spread, recorded}) if recorded is not None and recorded <= easy else spread


def _row(
    outlook: Outlook,
    known: Mapping[InputSize, Prediction],
    shares: Mapping[InputSize, float],
    budget: int,
    largest: Profile,
    lengths: Lengths | None,
) -> Row:
    recompute, runs, recomputed, step = 0.0, 0.0, 0.0, 0.0
    too_large, at_least, at_most = 0.0, 0.0, 0.0
    total, step_time = sum(shares.values()), outlook.step_time
    for size, estimate in known.items():
        profile, share = estimate.profile, shares[size]
        plan = outlook.plan(profile, budget)
        recompute += share / total * plan.extra_seconds
        runs += share * len(profile.runs)
        recomputed += share * plan.recomputed
        step += share / total * (step_time.seconds(profile) if step_time else 0)
        too_large += 0.0 if plan.fits else share
        least = outlook.least_budget(profile)
        error = estimate.uncertainty * least
        at_least += share * (not plan.fits and least - error > budget)
        at_most += share * (not plan.fits or least + error > budget)
    return Row(
        budget_bytes=budget,
        step_seconds=step + recompute if step_time else None,
        recompute_seconds=recompute,
        recomputed_share=recomputed / runs if runs else 0.0,
        too_large_share=too_large,
        too_large_range=(at_least, at_most),
        largest=_reach(outlook, budget, lengths) if lengths and lengths.one_way else None,
        largest_batch=_largest_batch(outlook, largest, budget),
    )


def _largest_batch(outlook: Outlook, profile: Profile, budget: int) -> int | None:
    """Scale in proportion: slightly low, since part of the peak does not grow with the batch."""
    if not profile.size.layout or not profile.size.layout[0][1]:
        return None
    prelude = profile.prelude or 0
    rise = peak(profile, [Option.RECOMPUTE] * len(profile.runs)) + prelude
    room = outlook.available(profile, budget) + prelude
    return max(0, int(profile.size.dims[0] * room / max(1, rise)))


def _reach(outlook: Outlook, budget: int, lengths: Lengths) -> Reach | None:
    """The longest input that fits: exact within the recorded lengths, a parabola beyond them."""
    longest = lengths.longest

    def need(length: int) -> float | None:
        profile = outlook.profile(lengths.at(length))
        return None if profile is None else float(outlook.least_budget(profile))

    top = need(longest)
    if top is None:
        return None
    if top > budget:
        return Reach(_last(lambda n: (need(n) or 0.0) <= budget, 0, longest), False)
    beyond = _parabola(sorted({longest * i // 12 for i in range(4, 13)}), need)
    if beyond is None:
        return Reach(longest, False)
    found = _last(lambda n: beyond(n) <= budget, longest, _FAR * longest)
    return Reach(found, extrapolated=found > longest)


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Binary search for the last number in low…high that fits; `low` must fit."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _parabola(
    lengths: Sequence[int], need: Callable[[int], float | None]
) -> Callable[[float], float] | None:
    """Least-squares parabola through these lengths, shifted to pass through the last one."""
    known = [(n, needed) for n in lengths if (needed := need(n)) is not None]
    if len(known) < 3:
        return None
    at, needs = np.array(known, float).T
    bend, slope, _ = np.polyfit(at, needs, 2)
    last, top = known[-1]
    bend = max(0.0, float(bend))
    rise = max(0.0, float(slope) + 2 * bend * last)
    return lambda n: top + (n - last) * (rise + bend * (n - last))
