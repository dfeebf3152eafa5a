"""From records to figures: ratios between contestants, overhead, prediction errors.

Ratios are formed within a round and then summed up by their median, with the lowest and the highest
round beside it. Where a contestant ran out of memory in some step, it did less work than the other:
then only steps that both finished are compared.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mimose.bench.contestants import StaticPlan
from mimose.bench.harness import Run, Steps
from mimose.bench.lineup import CONTESTANTS
from mimose.bench.records import Results
from mimose.bench.time_spent import (
    Breakdown,
    Overhead,
    breakdown_of,
    overhead_of,
    sum_where,
)
from mimose.bench.workloads import PAPER_TASKS, TASKS


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several rounds, and how far they lie apart."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        middle, low, high = (f"{v * factor:.{digits}f}" for v in (self.median, self.low, self.high))
        return middle if self.rounds == 1 else f"{middle} ({low}–{high})"


class Sheet:
    """The questions that tables and figures ask of one results file."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @property
    def scale(self) -> int:
        return int(self.results.conditions["scale"])

    @property
    def tasks(self) -> list[str]:
        return list(self.results.surveys)

    def limits(self, task: str) -> list[dict[str, Any]]:
        """The task's budgets that something was run under, the tightest first."""
        ran = {r.budget_bytes for r in self.results.records.values() if r.task == task}
        known = {row["total_bytes"]: row for row in reversed(self.results.limits.get(task, []))}
        return [known[total] for total in sorted(known) if total in ran]

    @property
    def cells_of_paper(self) -> list[tuple[str, int]]:
        """The paper's tasks, with each of their budgets."""
        tasks = [task for task in self.tasks if task in PAPER_TASKS]
        return [(task, limit["total_bytes"]) for task in tasks for limit in self.limits(task)]

    def contestants(self, task: str) -> list[str]:
        ran = {r.contestant for r in self.results.records.values() if r.task == task}
        return [name for name in CONTESTANTS if name in ran]

    def runs(self, task: str, budget: int | None, contestant: str) -> dict[int, Run]:
        """The runs by round; of contestants that no budget changes, this one's if there are any."""
        same = [
            r
            for r in self.results.records.values()
            if r.task == task and r.contestant == contestant and r.run.missing is None
        ]
        if CONTESTANTS[contestant].budgeted:
            same = [r for r in same if r.budget_bytes == budget]
        # The same cap counts, or the tightest.
        same.sort(key=lambda r: (r.budget_bytes == budget, -(r.budget_bytes or 0)))
        return {r.round: r.run for r in same}

    def missing(self) -> dict[tuple[str, str], str]:
        """Why a contestant did not run on a task."""
        return {
            (r.contestant, r.task): r.run.missing
            for r in self.results.records.values()
            if r.run.missing is not None
        }

    def seconds(self, task: str, budget: int | None, contestant: str) -> Spread | None:
        return Spread.of([r.seconds for r in self.runs(task, budget, contestant).values()])

    def ratio(self, task: str, budget: int | None, one: str, other: str) -> Spread | None:
        """One's time over the other's, round by round."""
        mine, its = self.runs(task, budget, one), self.runs(task, budget, other)
        pairs = [(mine[k], its[k]) for k in sorted(mine.keys() & its.keys())]
        return Spread.of([r for r in (time_ratio(a, b) for a, b in pairs) if r is not None])

    def fits(self, task: str, budget: int, contestant: str) -> bool:
        """Whether the plan of a static tool fits the budget; True for all that have no such plan.

        Where it does not, the tool recomputes everything and still would not fit. Its time is shown
        and marked, but not averaged in.
        """
        kind = CONTESTANTS[contestant]
        if not issubclass(kind, StaticPlan):
            return True
        return kind.plan(self.results.surveys[task], budget).fits

    def without_longer_data(self, tasks: Iterable[str]) -> list[str]:
        """Those whose data has no longer batch than was drawn: `static` planned for a drawn one."""
        surveys = self.results.surveys
        return [task for task in tasks if surveys[task].longest == surveys[task].largest]

    def recomputed_by_both(
        self, task: str, budget: int, one: str, other: str
    ) -> tuple[float, float] | None:
        """Blocks that each recomputed in a step, the mean over steps that both had planned."""
        mine, its = self.runs(task, budget, one), self.runs(task, budget, other)
        pairs = [
            pair
            for k in mine.keys() & its.keys()
            for pair in _planned_by_both(mine[k].steps, its[k].steps)
        ]
        if not pairs:
            return None
        return statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)

    def out_of_memory(self, task: str, budget: int | None, contestant: str) -> int:
        """Steps that ran out of memory, in the worst round."""
        runs = self.runs(task, budget, contestant).values()
        return max((run.out_of_memory for run in runs), default=0)

    def overhead(self, task: str, budget: int | None, contestant: str) -> list[Overhead]:
        """What a contestant spends beyond the oracle, round by round; none if it does not tell."""
        mine, best = self.runs(task, budget, contestant), self.runs(task, budget, "oracle")
        rounds = sorted(k for k in mine.keys() & best.keys() if "fit_seconds" in mine[k].spent)
        more = self.sizes(task, 1000) / self.sizes(task, self.results.conditions["steps"])
        return [overhead_of(mine[k], best[k], more) for k in rounds]

    def sizes(self, task: str, steps: int) -> int:
        """How many different sizes a run of so many steps has."""
        c = self.results.conditions
        return _sizes(task, steps, c["scale"], c["small"], c["seed"])

    def breakdown(self, task: str, budget: int | None) -> list[Breakdown]:
        """Where mimose's time goes, round by round."""
        mine, plain = self.runs(task, budget, "mimose"), self.runs(task, budget, "plain")
        return [breakdown_of(mine[k], plain[k]) for k in sorted(mine.keys() & plain.keys())]

    def prediction_errors(self, task: str, budget: int | None, contestant: str) -> list[float]:
        """Predicted over real peak, less one, of the first round's planned steps.

        Of full batches: the run's last has a batch size that was never seen, and is planned for as
        if it were full.
        """
        return self._errors(task, budget, contestant, lambda steps: steps.predicted_bytes)

    def untrusted_errors(self, task: str, budget: int | None, contestant: str) -> list[float]:
        """The same of steps with a bound or an untrusted prediction; none in older files."""
        return self._errors(task, budget, contestant, lambda steps: steps.untrusted_bytes)

    def _errors(
        self,
        task: str,
        budget: int | None,
        contestant: str,
        told: Callable[[Steps], Sequence[int | None]],
    ) -> list[float]:
        runs = self.runs(task, budget, contestant)
        if not runs:
            return []
        steps = runs[min(runs)].steps
        full = max(steps.rows)
        rows = zip(steps.rows, told(steps), steps.real_bytes, strict=False)
        return [(p - r) / r for n, p, r in rows if n == full and p is not None and r]

    def loss_difference(self, task: str, budget: int | None, contestant: str) -> float | None:
        """The largest difference of a step's loss from plain training's, over all rounds."""
        mine, plain = self.runs(task, budget, contestant), self.runs(task, None, "plain")
        differences = [
            abs(a - b)
            for k in mine.keys() & plain.keys()
            for a, b in zip(mine[k].steps.loss, plain[k].steps.loss, strict=True)
            if a is not None and b is not None
        ]
        return max(differences, default=None)


@functools.cache
def _sizes(task: str, steps: int, scale: int, small: bool, seed: int) -> int:
    return len(set(TASKS[task].shapes(steps, scale=scale, small=small, seed=seed)))


def time_ratio(one: Run, other: Run) -> float | None:
    """Whole runs; or, if memory ran out in any, the steps that both finished."""
    if not one.out_of_memory and not other.out_of_memory:
        return one.seconds / other.seconds if other.seconds else None
    failed = zip(one.steps.out_of_memory, other.steps.out_of_memory, strict=True)
    both = [not a and not b for a, b in failed]
    mine, its = (
        sum_where(one.steps.milliseconds, both),
        sum_where(other.steps.milliseconds, both),
    )
    return mine / its if its else None


def _planned_by_both(one: Steps, other: Steps) -> Iterator[tuple[int, int]]:
    """What each recomputed, step by step, where neither observed or ran out of memory."""
    rows = zip(one.recomputed, other.recomputed, one.observed, other.observed, strict=True)
    for mine, its, seen, also_seen in rows:
        if mine is not None and its is not None and not (seen or also_seen):
            yield mine, its
