"""What-if: what other budgets and other lengths would cost, without training.

From a recording (or a saved session) come profiles for any size; a planner gives each its plan
under each budget; the sum over the lengths is what an average step would take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.costs import InputSize, Profile, peak
from mimose.errors import ArgumentError
from mimose.estimation import Estimate, Shape
from mimose.reporting.outlook import Outlook

_FAR = 64
"""How many times the largest size seen is looked at at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One budget."""

    budget_bytes: int
    step_seconds: float | None
    """Expected time of a step; None if no step was ever timed."""
    recompute_seconds: float
    """Of which, on average, for recomputing."""
    recomputed_share: float
    """The share of block runs that are recomputed."""
    too_large_share: float
    """The share of steps that do not fit, whatever is recomputed."""
    too_large_range: tuple[float, float]
    """The same if extrapolated peaks are as low, and as high, as they may be."""
    largest: Reach | None
    """The largest input that fits at the usual batch."""
    largest_batch: int | None
    """About the largest batch that fits at the longest input."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The largest value of the dimension that varies."""

    length: int
    extrapolated: bool
    """Whether it lies beyond what was seen: then it is about right, not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """All budgets asked for, and the two that matter whatever was asked."""

    rows: tuple[Row, ...]
    least_budget_bytes: int
    """Below this the largest input does not fit, whatever is recomputed."""
    easy_budget_bytes: int
    """From this on nothing is ever recomputed."""
    largest: str
    """The largest input of the distribution, of those whose costs can be told."""
    uncertainty: float
    """How far off both budgets may be, as a share of them: 0 if its costs need no extrapolation."""
    sizes: int
    extrapolated_share: float
    """The share of steps that are larger than anything that was seen: their costs are those that
    would follow if memory went on growing as it did."""
    unknown_share: float
    """The share of steps whose costs cannot be told: times and shares of runs leave them out."""
    dimension: str | None
    """What `Reach.length` is a length of: the shape of the inputs, with n in it."""


class Lengths:
    """Turns a length into an input size of the run that is asked about."""

    def __init__(self, sizes: Sequence[InputSize]) -> None:
        usual = Counter(size.layout for size in sizes).most_common(1)[0][0]
        self._sizes = [size for size in sizes if size.layout == usual]
        self._shape = Shape.of(list(dict.fromkeys(self._sizes)))
        free = [i for i in range(len(self._shape.symbols)) if not self._is_batch(i)]
        self._free = free[0] if len(free) == 1 else None
        self._usual = Counter(self._sizes).most_common(1)[0][0]
        self.batch = self._usual.dims[0] if self._usual.dims else 1

    def _is_batch(self, symbol: int) -> bool:
        return len(self._shape.symbols) > 1 and self._shape.symbols[symbol][0].position == 0

    @property
    def one_way(self) -> bool:
        """Whether sizes vary in one way apart from the batch."""
        return self._free is not None

    @property
    def pattern(self) -> str | None:
        """The usual size with n for what varies."""
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
        """The usual size, but of this length."""
        if self._free is None:
            raise ArgumentError(
                "the recorded inputs vary in several ways, so a length alone says too little: "
                "leave the lengths out, and the recorded sizes are used"
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
    """What each budget would mean for steps of these sizes, which come as often as they weigh."""
    estimates = {size: outlook.extrapolate(size) for size in weights}
    known = {size: estimate for size, estimate in estimates.items() if estimate is not None}
    if not known:
        raise ArgumentError(
            "nothing is known of these sizes: record more steps (about ten, of differing size)"
        )
    total = sum(weights.values())
    shares = {size: weights[size] / total for size in known}
    profiles = {size: estimate.profile for size, estimate in known.items()}
    largest = max(known, key=lambda size: outlook.easy_budget(profiles[size]))
    least = max(map(outlook.least_budget, profiles.values()))
    easy = max(map(outlook.easy_budget, profiles.values()))
    asked = budgets or _spread(least, easy, outlook.budget_bytes)
    return Forecast(
        rows=tuple(_row(outlook, known, shares, b, profiles[largest], lengths) for b in asked),
        least_budget_bytes=least,
        easy_budget_bytes=easy,
        largest=str(largest),
        uncertainty=known[largest].uncertainty,
        sizes=len(known),
        extrapolated_share=sum(shares[s] for s in known if outlook.cost_model.beyond(s)),
        unknown_share=sum(weights[s] for s in weights if s not in known) / total,
        dimension=lengths.pattern if lengths else None,
    )


def _spread(least: int, easy: int, had: int | None) -> list[int]:
    """Budgets worth a look, from just enough to more than enough; and the one that the run had."""
    spread = [int(least + share * (easy - least)) for share in (0, 0.1, 0.25, 0.5, 0.75, 1)]
    return sorted({*spread, had}) if had is not None and had <= easy else spread


def _row(
    outlook: Outlook,
    known: Mapping[InputSize, Estimate],
    shares: Mapping[InputSize, float],
    budget: int,
    largest: Profile,
    lengths: Lengths | None,
) -> Row:
    again, runs, recomputed, step = 0.0, 0.0, 0.0, 0.0
    too_large, at_least, at_most = 0.0, 0.0, 0.0
    of_known = sum(shares.values())
    for size, estimate in known.items():
        profile, share = estimate.profile, shares[size]
        plan = outlook.plan(profile, budget)
        again += share / of_known * plan.recompute_seconds
        runs += share * len(profile.runs)
        recomputed += share * sum(plan.recompute)
        step += share / of_known * (outlook.step_time.seconds(profile) if outlook.step_time else 0)
        too_large += 0.0 if plan.fits else share
        off = estimate.uncertainty * outlook.least_budget(profile)
        at_least += share * (not plan.fits and outlook.least_budget(profile) - off > budget)
        at_most += share * (not plan.fits or outlook.least_budget(profile) + off > budget)
    return Row(
        budget_bytes=budget,
        step_seconds=step + again if outlook.step_time else None,
        recompute_seconds=again,
        recomputed_share=recomputed / runs if runs else 0.0,
        too_large_share=too_large,
        too_large_range=(at_least, at_most),
        largest=_reach(outlook, budget, lengths) if lengths and lengths.one_way else None,
        largest_batch=_largest_batch(outlook, largest, budget),
    )


def _largest_batch(outlook: Outlook, profile: Profile, budget: int) -> int | None:
    """In proportion, everything recomputed: a little low, since a part does not grow with it."""
    if not profile.size.layout or not profile.size.layout[0][1]:
        return None
    rise = peak(profile, [True] * len(profile.runs)) + profile.prelude
    room = outlook.available(profile, budget) + profile.prelude
    return max(0, int(profile.size.dims[0] * room / max(1, rise)))


def _reach(outlook: Outlook, budget: int, lengths: Lengths) -> Reach | None:
    """The largest length that fits: exact where sizes were seen, a parabola beyond them."""
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
    """The last number in low…high that fits, if low does and what follows an unfit one is unfit."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _parabola(
    lengths: Sequence[int], need: Callable[[int], float | None]
) -> Callable[[float], float] | None:
    """The parabola that fits these lengths best, lifted to the last one."""
    known = [(n, needed) for n in lengths if (needed := need(n)) is not None]
    if len(known) < 3:
        return None
    at, needs = np.array(known, float).T
    bend, slope, _ = np.polyfit(at, needs, 2)
    last, top = known[-1]
    bend = max(0.0, float(bend))
    rise = max(0.0, float(slope) + 2 * bend * last)
    return lambda n: top + (n - last) * (rise + bend * (n - last))
