"""Every planner of the field on the costs of one recorded run.

Peaks and fits are those of the timeline, whatever model a planner has planned with. Extra time is
that of all recomputes.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mimose.comparison.checkmate import Checkmate
from mimose.comparison.dtr import simulate
from mimose.comparison.programme import how_to_install_scipy
from mimose.comparison.rotor import Rotor
from mimose.comparison.stages import Outcome
from mimose.comparison.sublinear import Sublinear
from mimose.comparison.trace import Trace
from mimose.comparison.trace_file import read_trace
from mimose.costs import InputSize, Option, Profile, extra_nanoseconds
from mimose.errors import ArgumentError
from mimose.planning import Optimal, Plan, planner_named
from mimose.reporting import Outlook, read_recording
from mimose.units import text_of

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Budgets without --budget: so far from all recomputed to all kept."""

WITH_HOST = "optimal+host"
"""The default planner with host memory, if the recorded run had a link to it."""

_OF_DTR = (
    "dtr: h_DTR^eq, simulated on the operator trace. Its times are those of the trace, operator by "
    "operator; it decides during the step."
)
_SHOWN = 8
"""How many recorded sizes an error message lists."""

Planners = Mapping[str, Callable[[Profile, int], "Plan | Outcome"]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One planner under one budget."""

    planner: str
    extra_seconds: float
    over_bytes: int
    """By how much the peak exceeds what is available; 0 if it fits."""
    claims_to_fit: bool
    """Whether the planner's own model says that it fits."""
    planning_seconds: float
    bound_seconds: float | None = None
    """What no schedule of the planner's form is faster than, if it tells."""
    timed_out: bool = False

    @property
    def fits(self) -> bool:
        return self.over_bytes == 0


@dataclass(frozen=True, slots=True)
class Row:
    """One budget."""

    budget_bytes: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """All planners at one input size."""

    size: str
    blocks: int
    least_budget_bytes: int
    """What recomputing every block needs."""
    easy_budget_bytes: int
    """From here on everything is kept."""
    whole_seconds: float
    """Time of recomputing every block once."""
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All planners on one recording."""

    sizes: tuple[SizeComparison, ...]
    remarks: tuple[str, ...]


def compare(
    file: Path,
    sizes: Sequence[str] = (),
    budgets: Sequence[int] = (),
    time_limit_seconds: float = 10.0,
    trace: Path | None = None,
) -> Comparison:
    """Compare all planners on a recording: at the largest recorded size, or at these.

    With an operator trace of the same step, DTR is simulated beside them.
    """
    if trace is not None and len(sizes) > 1:
        raise ArgumentError("--trace: give one --size, that of the step that was traced")
    traced = None if trace is None else read_trace(trace)
    recording = read_recording(file)
    outlook = Outlook.of(recording)
    known = _profiles(outlook, [step.size for step in recording.steps])
    if not known:
        raise ArgumentError(f"{file} has no observed steps yet: train a few more steps")
    planners, remarks = planners_of_the_field(time_limit_seconds)
    if recording.remark:
        remarks = (f"{file}: {recording.remark}", *remarks)
    chosen = [_size_named(text, list(known)) for text in sizes]
    chosen = chosen or [max(known, key=lambda size: outlook.easy_budget(known[size]))]
    if traced is not None:
        remarks = (*remarks, _OF_DTR)
    compared = [
        compare_size(outlook, known[size], planners, budgets, traced)
        for size in dict.fromkeys(chosen)
    ]
    return Comparison(tuple(compared), (*remarks, *_below(compared)))


def _below(compared: Sequence[SizeComparison]) -> list[str]:
    """A remark on budgets that no plan can meet."""
    return [
        f"{text_of(row.budget_bytes)} is less than a plan of one choice a block needs at size "
        f"{size.size}, {text_of(size.least_budget_bytes)}: only other schedules may fit."
        for size in compared
        for row in size.rows
        if row.budget_bytes < size.least_budget_bytes and not row.cells[0].fits
    ]


def planners_of_the_field(time_limit_seconds: float) -> tuple[Planners, tuple[str, ...]]:
    """All planners by name; and a remark on each that is left out."""
    planners: dict[str, Callable[[Profile, int], Plan | Outcome]] = {
        name: planner_named(name).plan for name in ("optimal", "greedy", "greedy_literal")
    }
    planners["sublinear"] = Sublinear().schedule
    planners["rotor"] = Rotor().schedule
    if importlib.util.find_spec("scipy") is None:
        return planners, (f"checkmate is left out. {how_to_install_scipy()}",)
    planners["checkmate"] = Checkmate(time_limit_seconds).schedule
    return planners, ()


def _profiles(outlook: Outlook, sizes: Sequence[InputSize]) -> dict[InputSize, Profile]:
    """The costs of the recorded sizes, as far as they are known."""
    profiles = ((size, outlook.profile(size)) for size in dict.fromkeys(sizes))
    return {size: profile for size, profile in profiles if profile is not None}


def _size_named(text: str, sizes: list[InputSize]) -> InputSize:
    """The recorded size that is written like this, or whose last dimension is this number."""
    wanted = text.replace("x", "×").replace(" ", "")
    for size in sizes:
        if wanted == str(size).replace(" ", ""):
            return size
    lengths = {str(size).split("×")[-1]: size for size in sizes}
    if wanted in lengths:
        return lengths[wanted]
    shown = ", ".join(map(str, sizes[:_SHOWN])) + ("…" if sizes[_SHOWN:] else "")
    raise ArgumentError(f"--size {text!r} is not among the recorded sizes: {shown}")


def compare_size(
    outlook: Outlook,
    profile: Profile,
    planners: Planners,
    budgets: Sequence[int] = (),
    trace: Trace | None = None,
) -> SizeComparison:
    """Compare planners on one profile, under these budgets or from all recomputed to all kept.

    If the profile has a link to the host, `optimal+host` plans with it; all others without.
    """
    bare = replace(profile, link=None)
    least, easy = outlook.least_budget(bare), outlook.easy_budget(bare)
    whole = extra_nanoseconds(bare, [Option.RECOMPUTE] * len(bare.runs)) / 1e9
    wanted = budgets or sorted({int(least + share * (easy - least)) for share in SHARES})
    return SizeComparison(
        size=str(profile.size),
        blocks=len(profile.runs),
        least_budget_bytes=least,
        easy_budget_bytes=easy,
        whole_seconds=whole,
        rows=tuple(_row(outlook, profile, planners, budget, trace) for budget in wanted),
    )


def _row(
    outlook: Outlook, profile: Profile, planners: Planners, budget: int, trace: Trace | None
) -> Row:
    bare = replace(profile, link=None)
    available = outlook.available(bare, budget)
    if available <= 0:
        raise ArgumentError(
            f"--budget {text_of(budget)} leaves nothing for a step of size {profile.size}: "
            f"{text_of(outlook.base_bytes(bare))} are in use before it, and a share is kept in "
            f"reserve. Give at least {text_of(outlook.least_budget(bare))}"
        )
    cells = [cell_of(name, plan, bare, available) for name, plan in planners.items()]
    if profile.link is not None:
        cells.insert(1, cell_of(WITH_HOST, Optimal().plan, profile, available))
    if trace is not None:
        cells.append(cell_of_dtr(trace, (profile.prelude or 0) + available))
    return Row(budget, tuple(cells))


def cell_of_dtr(trace: Trace, available: int) -> Cell:
    """DTR on the traced step, with so many bytes beyond its parameters and its batch.

    It plans nothing in advance, and it is said to exceed the budget only if it fails.
    """
    run = simulate(trace, trace.constant_bytes + available)
    extra = max(0, run.nanoseconds - run.base_nanoseconds) / 1e9
    failed = run.failure is not None
    return Cell("dtr", extra, over_bytes=int(failed), claims_to_fit=False, planning_seconds=0.0)


def cell_of(
    name: str, plan: Callable[[Profile, int], Plan | Outcome], profile: Profile, available: int
) -> Cell:
    """A planner with so many bytes above the start of the first block."""
    start = time.perf_counter()
    made = plan(profile, available)
    took = time.perf_counter() - start
    over = max(0, made.peak_bytes - available)
    if isinstance(made, Plan):  # greedy planners take every plan of theirs to fit
        claims = made.fits or name not in ("optimal", WITH_HOST)
        return Cell(name, made.extra_seconds, over, claims, took)
    return Cell(
        name,
        made.extra_seconds,
        over,
        made.claims_to_fit,
        took,
        made.bound_seconds,
        made.timed_out,
    )
