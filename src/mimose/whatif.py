"""What-if: what other budgets and other lengths would cost, without training.

From a recording (or a saved session) come profiles for any size; a planner gives each its plan
under each budget; the sum over the lengths is what an average step would take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.errors import ArgumentError
from mimose.inputs import InputSize
from mimose.outlook import Outlook
from mimose.shapes import Shape
from mimose.timeline import Profile, peak

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
    """The largest input of the distribution."""
    sizes: int
    beyond_share: float
    """The share of steps left out: larger than anything that was seen."""
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
    profiles = {size: outlook.profile(size) for size in weights}
    known = {size: profile for size, profile in profiles.items() if profile is not None}
    if not known:
        raise ArgumentError(
            "nothing is known of these sizes: record more steps (about ten, of differing size)"
        )
    total = sum(weights.values())
    shares = {size: weights[size] / sum(weights[s] for s in known) for size in known}
    largest = max(known, key=lambda size: outlook.easy_budget(known[size]))
    least = max(outlook.least_budget(profile) for profile in known.values())
    easy = max(outlook.easy_budget(profile) for profile in known.values())
    asked = budgets or _spread(least, easy, outlook.budget_bytes)
    return Forecast(
        rows=tuple(_row(outlook, known, shares, b, known[largest], lengths) for b in asked),
        least_budget_bytes=least,
        easy_budget_bytes=easy,
        largest=str(largest),
        sizes=len(known),
        beyond_share=1 - sum(weights[size] for size in known) / total,
        dimension=lengths.pattern if lengths else None,
    )


def _spread(least: int, easy: int, had: int | None) -> list[int]:
    """Budgets worth a look, from just enough to more than enough; and the one that the run had."""
    spread = [int(least + share * (easy - least)) for share in (0, 0.1, 0.25, 0.5, 0.75, 1)]
    return sorted({*spread, had}) if had is not None and had <= easy else spread


def _row(
    outlook: Outlook,
    known: Mapping[InputSize, Profile],
    shares: Mapping[InputSize, float],
    budget: int,
    largest: Profile,
    lengths: Lengths | None,
) -> Row:
    again, runs, recomputed, too_large, step = 0.0, 0.0, 0.0, 0.0, 0.0
    for size, profile in known.items():
        plan, share = outlook.plan(profile, budget), shares[size]
        again += share * plan.recompute_seconds
        runs += share * len(profile.runs)
        recomputed += share * sum(plan.recompute)
        too_large += 0.0 if plan.fits else share
        step += share * (outlook.step_time.seconds(profile) if outlook.step_time else 0.0)
    return Row(
        budget_bytes=budget,
        step_seconds=step + again if outlook.step_time else None,
        recompute_seconds=again,
        recomputed_share=recomputed / runs if runs else 0.0,
        too_large_share=too_large,
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
