"""What-if forecasts: time and memory under other budgets, host memory and lengths.

The costs of each size come from a recording or a saved state_dict, the plan for each size and
budget from a planner. Averages are weighted by how often each size occurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mimose.costs import InputSize, Link, Profile
from mimose.errors import ArgumentError
from mimose.estimation import Prediction, Shape
from mimose.planning import strictest
from mimose.reporting.outlook import Outlook
from mimose.reporting.reach import Reach, reach_of

_ANY = 1 << 62
"""More host memory than any plan can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The forecast for one budget."""

    budget_bytes: int
    step_seconds: float | None
    """Mean time of a step; None if the file has no step times."""
    recompute_seconds: float
    """Mean time of recomputing in a step; part of `step_seconds`."""
    stall_seconds: float
    """Mean time that the device waits for transfers in a step; part of `step_seconds`."""
    host_bytes: int
    """The most host memory that one of the plans holds."""
    recomputed_share: float
    """Share of block runs that are recomputed."""
    too_large_share: float
    """Share of steps that do not fit even under the strictest plan."""
    too_large_range: tuple[float, float]
    """Lower and upper limit of `too_large_share`, given the uncertainty of extrapolated peaks."""
    largest: Reach | None
    """The longest input that fits at the most common batch size."""
    largest_batch: int | None
    """Approximate largest batch that fits at the largest input size."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """The forecast for the recorded budget with other host memory."""

    limit_bytes: int | None
    """What plans may hold in host memory; None for any amount."""
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One row per budget, and the smallest and largest budget of interest."""

    rows: tuple[Row, ...]
    host_rows: tuple[HostRow, ...]
    """Without host memory, with as much as in the run, and with more if plans would use it; empty
    if the file has no link to the host."""
    least_budget_bytes: int
    """Below this budget the largest input does not fit even under the strictest plan."""
    easy_budget_bytes: int
    """From this budget on, every block is kept."""
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
        host_rows=_host_rows(outlook, known, shares, profiles[largest], lengths),
        least_budget_bytes=least,
        easy_budget_bytes=easy,
        largest=str(largest),
        uncertainty=known[largest].uncertainty,
        sizes=len(known),
        extrapolated_share=sum(shares[s] for s in known if outlook.cost_model.exceeds_observed(s)),
        unknown_share=sum(weights[s] for s in weights if s not in known) / total,
        dimension=lengths.pattern if lengths else None,
    )


def _spread(least: int, easy: int, recorded: int | None) -> list[int]:
    """Budgets from all recomputed to all kept, with the recorded one if it is in that range."""
    spread = [int(least + share * (easy - least)) for share in (0, 0.1, 0.25, 0.5, 0.75, 1)]
    return sorted({*spread, recorded}) if recorded is not None and recorded <= easy else spread


def _host_rows(
    outlook: Outlook,
    known: Mapping[InputSize, Prediction],
    shares: Mapping[InputSize, float],
    largest: Profile,
    lengths: Lengths | None,
) -> tuple[HostRow, ...]:
    """What host memory buys at the recorded budget."""
    link, budget = outlook.link, outlook.budget_bytes
    if link is None or budget is None or not any(e.profile.link for e in known.values()):
        return ()

    def row(limit: int | None) -> HostRow:
        other = _limited(link, limit)
        estimates = {
            size: replace(estimate, profile=_with_link(estimate.profile, other))
            for size, estimate in known.items()
        }
        within, at_largest = replace(outlook, link=other), _with_link(largest, other)
        return HostRow(limit, _row(within, estimates, shares, budget, at_largest, lengths))

    rows, unlimited = [row(0), row(link.host_bytes)], row(None)
    if unlimited.row.host_bytes > link.host_bytes:
        rows += [row(2 * link.host_bytes), unlimited]
    return tuple(rows)


def _limited(link: Link, limit: int | None) -> Link | None:
    """The link with so much host memory; None without any."""
    return None if limit == 0 else link._replace(host_bytes=_ANY if limit is None else limit)


def _with_link(profile: Profile, link: Link | None) -> Profile:
    """The same costs with another link, if steps of this size can use one."""
    return profile if profile.link is None else replace(profile, link=link)


def _row(
    outlook: Outlook,
    known: Mapping[InputSize, Prediction],
    shares: Mapping[InputSize, float],
    budget: int,
    largest: Profile,
    lengths: Lengths | None,
) -> Row:
    recompute, stall, runs, recomputed, step, on_host = 0.0, 0.0, 0.0, 0.0, 0.0, 0
    too_large, at_least, at_most = 0.0, 0.0, 0.0
    total, step_time = sum(shares.values()), outlook.step_time
    for size, estimate in known.items():
        profile, share = estimate.profile, shares[size]
        plan = outlook.plan(profile, budget)
        recompute += share / total * (plan.extra_seconds - plan.stall_seconds)
        stall += share / total * plan.stall_seconds
        on_host = max(on_host, plan.host_bytes)
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
        step_seconds=step + recompute + stall if step_time else None,
        recompute_seconds=recompute,
        stall_seconds=stall,
        host_bytes=on_host,
        recomputed_share=recomputed / runs if runs else 0.0,
        too_large_share=too_large,
        too_large_range=(at_least, at_most),
        largest=reach_of(outlook, budget, lengths) if lengths and lengths.one_way else None,
        largest_batch=_largest_batch(outlook, largest, budget),
    )


def _largest_batch(outlook: Outlook, profile: Profile, budget: int) -> int | None:
    """Scale in proportion: slightly low, since part of the peak does not grow with the batch."""
    if not profile.size.layout or not profile.size.layout[0][1]:
        return None
    prelude = profile.prelude or 0
    rise = strictest(profile, 0).peak_bytes + prelude
    room = outlook.available(profile, budget) + prelude
    return max(0, int(profile.size.dims[0] * room / max(1, rise)))
