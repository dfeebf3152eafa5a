"""mimose's planners and published ones on the costs of one recorded run.

Peaks come from the timeline, whatever model a planner has planned with. Extra time is the time of
all recomputes.
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
from mimose.costs import InputSize, Option, Profile, extra_nanoseconds, peak
from mimose.errors import ArgumentError
from mimose.planning import Optimal, Plan, planner_named
from mimose.reporting import Outlook, read_recording, refuse_without_steps
from mimose.units import text_of

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Budgets without --budget, from all recomputed (0) to all kept (1)."""

WITH_HOST = "optimal+host"
"""The default planner with host memory, if the recorded run had a link to it."""
DTR = "dtr"
"""DTR on an operator trace. It decides during the step, so it has no time of planning."""

_DTR_REMARK = (
    "dtr: h_DTR^eq, simulated on the operator trace with the measured time of each operator. It "
    "decides during the step."
)
_SAME_STEP = 0.2
"""How far the peaks of a trace and of the recorded step may be apart, as a share. Eight traces
from an H200 were at most 0.0103 apart from their recordings."""
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
    """Lower bound on the time of any schedule of the planner's form; None if it gives none."""
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
    """The least budget with every block recomputed."""
    easy_budget_bytes: int
    """From this budget on, everything is kept."""
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
    """Compare all planners on a recording, at these sizes or at the largest recorded one.

    With an operator trace of the same step, DTR is simulated beside them.
    """
    if trace is not None and len(sizes) > 1:
        raise ArgumentError("--trace: give one --size, the size of the traced step")
    traced = None if trace is None else read_trace(trace)
    recording = read_recording(file)
    if recording.unreadable:
        refuse_without_steps(recording, file)
    outlook = Outlook.of(recording)
    known = _profiles(outlook, [step.size for step in recording.steps])
    if not known:
        raise ArgumentError(f"{file} has no observed steps yet: train a few more steps")
    planners, remarks = planners_of_the_field(time_limit_seconds)
    if recording.remark:
        remarks = (f"{file}: {recording.remark}", *remarks)
    chosen = [_size_named(text, list(known)) for text in sizes]
    chosen = chosen or [max(known, key=lambda size: outlook.easy_budget(known[size]))]
    if trace is not None and traced is not None:
        _refuse_trace_of_another_step(trace, traced, known[chosen[0]])
        remarks = (*remarks, _DTR_REMARK)
    compared = [
        compare_size(outlook, known[size], planners, budgets, traced)
        for size in dict.fromkeys(chosen)
    ]
    return Comparison(tuple(compared), (*remarks, *_remarks_on_low_budgets(compared)))


def _refuse_trace_of_another_step(file: Path, trace: Trace, profile: Profile) -> None:
    traced = trace.peak_bytes - trace.constant_bytes
    all_kept = [Option.KEEP] * len(profile.runs)
    recorded = (profile.prelude or 0) + peak(replace(profile, link=None), all_kept)
    if abs(traced - recorded) > _SAME_STEP * recorded:
        raise ArgumentError(
            f"{file} is not a trace of this step: it rises by {text_of(traced)}, and the recorded "
            f"step of size {profile.size} by {text_of(recorded)} with everything kept. Record a "
            "trace at this size (mimose trace), or choose the traced one with --size"
        )


def _remarks_on_low_budgets(compared: Sequence[SizeComparison]) -> list[str]:
    """A remark for each budget that no plan can meet."""
    return [
        f"{text_of(row.budget_bytes)} is too little for any plan with one choice per block at size "
        f"{size.size} (least: {text_of(size.least_budget_bytes)}); only other schedules can fit."
        for size in compared
        for row in size.rows
        if row.budget_bytes < size.least_budget_bytes and not row.cells[0].fits
    ]


def planners_of_the_field(time_limit_seconds: float) -> tuple[Planners, tuple[str, ...]]:
    """All planners by name, and a remark on each that is left out."""
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
    """The costs of the recorded sizes that can be predicted."""
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
    without_link = replace(profile, link=None)
    least, easy = outlook.least_budget(without_link), outlook.easy_budget(without_link)
    recompute_all = [Option.RECOMPUTE] * len(profile.runs)
    wanted = budgets or sorted({int(least + share * (easy - least)) for share in SHARES})
    return SizeComparison(
        size=str(profile.size),
        blocks=len(profile.runs),
        least_budget_bytes=least,
        easy_budget_bytes=easy,
        whole_seconds=extra_nanoseconds(without_link, recompute_all) / 1e9,
        rows=tuple(_row(outlook, profile, planners, budget, trace) for budget in wanted),
    )


def _row(
    outlook: Outlook, profile: Profile, planners: Planners, budget: int, trace: Trace | None
) -> Row:
    without_link = replace(profile, link=None)
    available = outlook.available(without_link, budget)
    if available <= 0:
        raise ArgumentError(
            f"--budget {text_of(budget)} leaves nothing for a step of size {profile.size}: "
            f"{text_of(outlook.base_bytes(without_link))} is in use before it, and part of the "
            f"budget is a reserve. Give at least {text_of(outlook.least_budget(without_link))}"
        )
    cells = [cell_of(name, plan, without_link, available) for name, plan in planners.items()]
    if profile.link is not None:
        cells.insert(1, cell_of(WITH_HOST, Optimal().plan, profile, available))
    if trace is not None:
        cells.append(cell_of_dtr(trace, (profile.prelude or 0) + available))
    return Row(budget, tuple(cells))


def cell_of_dtr(trace: Trace, available: int) -> Cell:
    """DTR on the traced step, with `available` bytes on top of its parameters and its batch.

    DTR plans nothing in advance. It counts as over the budget only if the simulation fails.
    """
    run = simulate(trace, trace.constant_bytes + available)
    extra = max(0, run.nanoseconds - run.base_nanoseconds) / 1e9
    failed = run.failure is not None
    return Cell(DTR, extra, over_bytes=int(failed), claims_to_fit=False, planning_seconds=0.0)


def cell_of(
    name: str, plan: Callable[[Profile, int], Plan | Outcome], profile: Profile, available: int
) -> Cell:
    """A planner with `available` bytes on top of what is in use at the first block."""
    start = time.perf_counter()
    made = plan(profile, available)
    took = time.perf_counter() - start
    over = max(0, made.peak_bytes - available)
    if isinstance(made, Plan):  # greedy planners consider all of their plans to fit
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
