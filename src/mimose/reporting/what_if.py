"""What-if forecasts: time and memory under other budgets, host memory and lengths.

The costs of each size come from a recording or a saved state_dict, the plan for each size and
budget from a planner. Averages are weighted by how often each size occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mimose.costs import InputSize, Link, Profile
from mimose.errors import ArgumentError
from mimose.estimation import Prediction
from mimose.planning import Plan
from mimose.reporting.explain import largest_batch
from mimose.reporting.outlook import Outlook
from mimose.reporting.reach import Reach, reach_of
from mimose.reporting.recorded_lengths import RecordedLengths

_UNLIMITED = 1 << 62
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
    """Share of steps whose plan does not fit."""
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
    steps: float
    """The number of recorded steps, or the sum of the given counts of lengths; 1 for samples."""
    extrapolated_share: float
    """Share of steps larger than any size that was measured; their costs are extrapolated."""
    unknown_share: float
    """Share of steps whose costs cannot be predicted; excluded from times and shares of runs."""
    dimension: str | None
    """The input shape with n in place of `Reach.length`."""


def forecast(
    outlook: Outlook,
    weights: Mapping[InputSize, float],
    budgets: Sequence[int] | None = None,
    lengths: RecordedLengths | None = None,
) -> Forecast:
    """Forecast each budget for steps of these sizes and relative frequencies."""
    known = {size: p for size in weights if (p := outlook.extrapolate(size)) is not None}
    if not known:
        raise ArgumentError(
            "the costs of these sizes cannot be predicted: record more steps (about ten, of "
            "different sizes)"
        )
    total = sum(weights.values())
    shares = {size: weights[size] / total for size in known}
    profiles = {size: prediction.profile for size, prediction in known.items()}
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
        steps=total,
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
    lengths: RecordedLengths | None,
) -> tuple[HostRow, ...]:
    """The recorded budget with less and with more host memory."""
    link, budget = outlook.link, outlook.budget_bytes
    if link is None or budget is None or not any(p.profile.link for p in known.values()):
        return ()

    def row(limit: int | None) -> HostRow:
        limited = _limited(link, limit)
        predictions = {
            size: replace(prediction, profile=_with_link(prediction.profile, limited))
            for size, prediction in known.items()
        }
        within, at_largest = replace(outlook, link=limited), _with_link(largest, limited)
        return HostRow(limit, _row(within, predictions, shares, budget, at_largest, lengths))

    rows, unlimited = [row(0), row(link.host_bytes)], row(None)
    if unlimited.row.host_bytes > link.host_bytes:
        rows += [row(2 * link.host_bytes), unlimited]
    return tuple(rows)


def _limited(link: Link, limit: int | None) -> Link | None:
    """The link if plans may hold at most `limit` bytes on the host; None for no host memory."""
    return None if limit == 0 else link._replace(host_bytes=_UNLIMITED if limit is None else limit)


def _with_link(profile: Profile, link: Link | None) -> Profile:
    """The same costs with another link, if steps of this size can use one."""
    return profile if profile.link is None else replace(profile, link=link)


def _row(
    outlook: Outlook,
    known: Mapping[InputSize, Prediction],
    shares: Mapping[InputSize, float],
    budget: int,
    largest: Profile,
    lengths: RecordedLengths | None,
) -> Row:
    plans = {size: outlook.plan(known[size].profile, budget) for size in known}
    total, step_time = sum(shares.values()), outlook.step_time

    def mean(value_of: Callable[[InputSize], float]) -> float:
        """The mean over the steps whose costs are known."""
        return sum(shares[size] / total * value_of(size) for size in known)

    recompute = mean(lambda size: plans[size].extra_seconds - plans[size].stall_seconds)
    stall = mean(lambda size: plans[size].stall_seconds)
    runs = mean(lambda size: len(known[size].profile.runs))
    recomputed = mean(lambda size: plans[size].recomputed)
    step_seconds = None
    if step_time is not None:
        step_seconds = mean(lambda size: step_time.seconds(known[size].profile)) + recompute + stall
    return Row(
        budget_bytes=budget,
        step_seconds=step_seconds,
        recompute_seconds=recompute,
        stall_seconds=stall,
        host_bytes=max(plan.host_bytes for plan in plans.values()),
        recomputed_share=recomputed / runs if runs else 0.0,
        too_large_share=sum(shares[size] for size in known if not plans[size].fits),
        too_large_range=_too_large_range(outlook, known, shares, plans, budget),
        largest=_reach(outlook, budget, lengths),
        largest_batch=largest_batch(largest, outlook.available(largest, budget)),
    )


def _too_large_range(
    outlook: Outlook,
    known: Mapping[InputSize, Prediction],
    shares: Mapping[InputSize, float],
    plans: Mapping[InputSize, Plan],
    budget: int,
) -> tuple[float, float]:
    """The share of steps that do not fit if peaks are as low, and as high, as they may be.

    A plan that does not fit is certain to, unless its peak is uncertain. A plan that fits may still
    have to give way to the strictest one if peaks are higher than predicted.
    """
    lower = upper = 0.0
    for size, prediction in known.items():
        plan, doubt = plans[size], prediction.uncertainty
        need = outlook.budget_for(prediction.profile, plan)
        least = outlook.least_budget(prediction.profile)
        lower += shares[size] * (not plan.fits and (not doubt or need * (1 - doubt) > budget))
        upper += shares[size] * (not plan.fits or least * (1 + doubt) > budget)
    return lower, upper


def _reach(outlook: Outlook, budget: int, lengths: RecordedLengths | None) -> Reach | None:
    if lengths is None or not lengths.one_dimension_varies:
        return None
    return reach_of(outlook, budget, lengths)
