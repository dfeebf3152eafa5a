"""The figures of single input sizes in a report: plans, peaks, and memory over a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from mimose.costs import InputSize, Option, Profile, peak
from mimose.estimation import Prediction
from mimose.planning import Plan
from mimose.reporting.outlook import Outlook, whole_seconds
from mimose.reporting.page.curve import curve
from mimose.reporting.page.size_axis import SizeAxis
from mimose.reporting.page.traffic import Copy, copies
from mimose.reporting.reader import RecordedStep, Recording

_MOST_SIZES = 48
"""Of more sizes than these, an even selection is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """One input size: its plan, its peaks, and its memory over the course of a step."""

    label: str
    at_most_as: str | None
    """The size whose values serve as upper bounds; None if they are predictions."""
    x: int
    """The position on the size axis."""
    steps: int
    """The number of steps of this size."""
    base_bytes: int
    plan: str
    plan_peak_bytes: int
    kept_peak_bytes: int
    recomputed_peak_bytes: int
    plan_seconds: float
    """Time of recomputing under the plan."""
    moved_bytes: int
    """What the plan moves to the host, and back again."""
    stall_seconds: float
    """Time that the device waits for that under the plan."""
    whole_seconds: float
    """Time of recomputing everything."""
    saved_bytes: tuple[int, ...]
    """Memory that keeping each run costs."""
    run_seconds: tuple[float, ...]
    """Time to recompute each run."""
    curves: dict[str, list[tuple[str, int, float, int]]]
    """For "plan", "kept" and "recomputed": phase, run, seconds, bytes of the process."""
    copies: list[Copy]
    """The traffic on the link to the host under the plan."""


def figures_by_size(
    recording: Recording, outlook: Outlook, axis: SizeAxis
) -> tuple[SizeFigures, ...]:
    """The figures of the recorded sizes in the order of the axis, thinned out if they are many."""
    counts = Counter(step.size for step in recording.steps if axis.shows(step.size))
    predictions = {size: known for size in counts if (known := outlook.predict(size)) is not None}
    sizes = sorted(predictions, key=lambda size: (axis.x(size), size.dims))
    if len(sizes) > _MOST_SIZES:
        last = len(sizes) - 1
        sizes = [sizes[round(i * last / (_MOST_SIZES - 1))] for i in range(_MOST_SIZES)]
    planned = {step.size: step for step in recording.planned if step.has_own_plan}
    figures = []
    for size in sizes:
        prediction = _as_planned(predictions[size], planned.get(size))
        plan = _plan(outlook, prediction.profile, planned.get(size), recording.header.budget_bytes)
        figures.append(
            _figures(outlook, size, prediction, plan, x=axis.x(size), steps=counts[size])
        )
    return tuple(figures)


def _as_planned(prediction: Prediction, step: RecordedStep | None) -> Prediction:
    """The prediction with the link to the host that this step was planned with."""
    if step is None:
        return prediction
    return replace(prediction, profile=replace(prediction.profile, link=step.link))


def _plan(outlook: Outlook, profile: Profile, step: RecordedStep | None, budget: int) -> Plan:
    """The recorded plan of this step; a new one if all steps of this size were observed."""
    if step is None or step.plan is None or len(step.plan) != len(profile.runs):
        return outlook.plan(profile, budget)
    return Plan.of(profile, Option.of_letters(step.plan), outlook.available(profile, budget))


def _figures(
    outlook: Outlook, size: InputSize, prediction: Prediction, plan: Plan, *, x: int, steps: int
) -> SizeFigures:
    profile = prediction.profile
    base, count = outlook.base_bytes(profile), len(profile.runs)
    choices = {
        "plan": plan.choices,
        "kept": (Option.KEEP,) * count,
        "recomputed": (Option.RECOMPUTE,) * count,
    }
    runs = zip(profile.runs, plan.choices, strict=True)
    curves = {name: curve(profile, chosen) for name, chosen in choices.items()}
    return SizeFigures(
        label=str(size),
        at_most_as=None if prediction.bound_of is None else str(prediction.bound_of),
        x=x,
        steps=steps,
        base_bytes=base,
        plan="".join("f" if run.fixed else option.letter for run, option in runs),
        plan_peak_bytes=base + plan.peak_bytes,
        kept_peak_bytes=base + peak(profile, choices["kept"]),
        recomputed_peak_bytes=base + peak(profile, choices["recomputed"]),
        plan_seconds=plan.extra_seconds - plan.stall_seconds,
        moved_bytes=plan.moved_bytes,
        stall_seconds=plan.stall_seconds,
        whole_seconds=whole_seconds(profile),
        saved_bytes=tuple(run.saved for run in profile.runs),
        run_seconds=tuple(run.nanoseconds / 1e9 for run in profile.runs),
        curves={
            name: [(m.phase, m.run, m.seconds, base + m.bytes) for m in moments]
            for name, moments in curves.items()
        },
        copies=copies(profile, plan.choices, curves["plan"]),
    )
