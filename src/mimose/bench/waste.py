"""What a way of training leaves unused, and what it spends: the paper's Figs. 4 and 5.

A plan for the largest batch leaves memory unused on all others and recomputes what need not be.
Eviction on shortage decides anew in every step, and the allocator may hold more than is in use.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mimose.bench.analysis import Sheet
from mimose.bench.batches import BatchShape
from mimose.bench.harness import Run, Steps
from mimose.bench.workloads import TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Of one run, compared with plain training; steps that ran out of memory do not count."""

    unused_bytes: float
    """Budget less the peak in use, the mean over steps."""
    unused_bytes_of_short: float
    """The same over the shortest quarter of the batches."""
    short_over_plain: float
    """Time on the shortest quarter of the batches, over plain training's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Shares of one run's time, and the memory it held."""

    deciding: float
    """Share of the time in which the host decided or evicted."""
    recomputing: float
    """Share of the time for what was computed again."""
    most_held_bytes: int
    most_beyond_use_bytes: int
    """The most that the allocator held beyond the peak in use of the same step."""


def waste(sheet: Sheet, task: str, budget: int, contestant: str) -> list[Waste]:
    """What a contestant leaves unused, round by round; none without plain training beside it."""
    mine, plain = sheet.runs(task, budget, contestant), sheet.runs(task, budget, "plain")
    found = (_waste(task, budget, mine[k], plain[k]) for k in sorted(mine.keys() & plain.keys()))
    return [each for each in found if each is not None]


def _waste(task: str, budget: int, run: Run, plain: Run) -> Waste | None:
    failed = zip(run.steps.out_of_memory, plain.steps.out_of_memory, strict=True)
    done = [k for k, (mine, its) in enumerate(failed) if not mine and not its]
    short = shortest_quarter(task, run.steps, done)
    its = sum(plain.steps.milliseconds[k] for k in short)
    if not its:
        return None
    peaks = run.steps.peak_bytes
    return Waste(
        unused_bytes=budget - statistics.fmean(peaks[k] for k in done),
        unused_bytes_of_short=budget - statistics.fmean(peaks[k] for k in short),
        short_over_plain=sum(run.steps.milliseconds[k] for k in short) / its,
    )


def shortest_quarter(task: str, steps: Steps, among: Sequence[int]) -> list[int]:
    """A quarter of these steps, at least one if there are any: those with the smallest batches."""
    elements = TASKS[task].source.elements
    sizes = {k: elements(BatchShape(steps.rows[k], tuple(steps.lengths[k]))) for k in among}
    return sorted(among, key=lambda k: (sizes[k], k))[: max(1, len(among) // 4)]


def parts(sheet: Sheet, task: str, budget: int, contestant: str) -> list[Parts]:
    """Where a contestant's time went, round by round; none if it does not tell."""
    runs = sheet.runs(task, budget, contestant)
    return [_parts(run) for _, run in sorted(runs.items()) if "recompute_seconds" in run.spent]


def _parts(run: Run) -> Parts:
    spent, steps = run.spent, run.steps
    deciding = spent["deciding_seconds"] + spent.get("fit_seconds", 0.0)
    beyond = (held - peak for held, peak in zip(steps.held_bytes, steps.peak_bytes, strict=True))
    return Parts(
        deciding=deciding / run.seconds,
        recomputing=spent["recompute_seconds"] / run.seconds,
        most_held_bytes=max(steps.held_bytes),
        most_beyond_use_bytes=max(beyond),
    )
