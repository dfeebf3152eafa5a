"""Where the time of a run goes, beside the oracle and beside plain training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mimose.bench.harness import Run, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What mimose spends beyond the oracle in one run, in iterations of the oracle."""

    steps: int
    observed: int
    """Steps observed."""
    fits: int
    plans: int
    """New plans; all others came from the cache."""
    collector: float
    """Observed steps, over what the oracle took for the same steps; without what is counted as the
    estimator's or the planner's."""
    estimator: float
    """Fitting; in files that tell it apart, predicting too."""
    planner: float
    """Deciding, from a step's first block to its plan; without what is the estimator's."""
    whole: float
    """The whole run's time over the oracle's: all of the above, and noise."""
    in_thousand_steps: float
    """Collector and fits once, a decision a step, and as many more decisions about new sizes as
    1,000 batches of the task have more sizes than this run's."""
    plan_milliseconds: float | None
    """Estimates and plans for one new plan."""
    same_plan_milliseconds: float | None
    """By how much a step took longer in which the oracle recomputed as many blocks; the mean."""
    iteration_milliseconds: float
    """A step of the oracle, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The seconds of one run of mimose, by what they were spent on."""

    plain: float
    """What plain training takes for the same steps."""
    recomputing: float
    """In planned steps, by the estimator's own account."""
    observing: float
    """Observed steps, over what plain training took for them: mostly recomputing, too."""
    deciding: float
    """Fitting, predicting, planning, on the host."""
    rest: float
    """What is left: hooks, waiting, noise."""


def breakdown_of(run: Run, plain: Run) -> Breakdown:
    """The breakdown of a run of mimose, beside plain training of the same steps."""
    spent = run.spent
    parts = {
        "plain": plain.seconds,
        "recomputing": float(spent["recompute_seconds"]),
        "observing": _extra_seconds(run, plain),
        "deciding": float(spent["fit_seconds"] + spent["deciding_seconds"]),
    }
    return Breakdown(**parts, rest=run.seconds - sum(parts.values()))


def overhead_of(run: Run, oracle: Run, more_sizes: float) -> Overhead:
    """The overhead of a run; 1,000 steps have `more_sizes` times as many sizes as the run."""
    steps = len(run.steps.milliseconds)
    iteration = oracle.seconds / steps
    spent = run.spent
    collector = (
        _extra_seconds(run, oracle) - spent.get("counted_in_observed_seconds", 0.0)
    ) / iteration
    predict_seconds = spent.get("predict_seconds", 0.0)  # in older files
    fitting, predicting = spent["fit_seconds"] / iteration, predict_seconds / iteration
    deciding = spent["deciding_seconds"] / iteration
    new = spent.get("new_plan_seconds", spent["plan_seconds"] + predict_seconds)
    again = spent.get("repeating_seconds", spent["deciding_seconds"] - new) / iteration
    repeats = spent.get("repeated_decisions", steps)
    return Overhead(
        steps=steps,
        observed=spent["observed_steps"],
        fits=spent["fits"],
        plans=spent["plans"],
        collector=collector,
        estimator=fitting + predicting,
        planner=max(0.0, deciding - predicting),
        whole=(run.seconds - oracle.seconds) / iteration,
        in_thousand_steps=collector
        + fitting
        + max(0.0, again) * (1000 / repeats if repeats else 0)
        + max(0.0, deciding - again) * more_sizes,
        plan_milliseconds=1e3 * new / spent["plans"] if spent["plans"] else None,
        same_plan_milliseconds=mean(_same_plan(run.steps, oracle.steps)),
        iteration_milliseconds=1e3 * iteration,
    )


def _extra_seconds(run: Run, other: Run) -> float:
    """How much longer the observed steps of a run took than the same steps of another run."""
    observed = run.steps.observed
    its = sum_where(other.steps.milliseconds, observed)
    return (sum_where(run.steps.milliseconds, observed) - its) / 1e3


def _same_plan(mine: Steps, its: Steps) -> Iterator[float]:
    """How much longer each planned step took in which the other recomputed as many blocks."""
    for k, recomputed in enumerate(mine.recomputed):
        if recomputed is not None and recomputed == its.recomputed[k] and not mine.observed[k]:
            yield mine.milliseconds[k] - its.milliseconds[k]


def mean(values: Iterable[float]) -> float | None:
    """The mean; None if there are no values."""
    known = list(values)
    return statistics.fmean(known) if known else None


def sum_where(values: Sequence[float], where: Sequence[bool]) -> float:
    """The sum of the values that are selected."""
    return sum(value for value, counts in zip(values, where, strict=True) if counts)
