"""What a report shows of a recorded run: plain values, for a page, a text or a picture alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mimose.costs import InputSize, Profile, peak, recompute_nanoseconds
from mimose.estimation import Estimate, Shape
from mimose.planning import Optimal, Plan, Static
from mimose.reporting.outlook import Outlook, whole_seconds
from mimose.reporting.page.curve import curve
from mimose.reporting.reader import RecordedStep, Recording

_MOST_STEPS = 4000
_MOST_SIZES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """One input size: its peaks, its plan, its memory from moment to moment."""

    label: str
    at_most_as: str | None
    """If its figures are upper bounds: the size that they are of."""
    x: int
    """Its place on an axis of sizes."""
    steps: int
    """How many steps had it."""
    base_bytes: int
    plan: str
    plan_peak_bytes: int
    kept_peak_bytes: int
    recomputed_peak_bytes: int
    plan_seconds: float
    """Of recomputing, under the plan."""
    whole_seconds: float
    """Of recomputing everything."""
    saved_bytes: tuple[int, ...]
    """What keeping each run costs."""
    run_seconds: tuple[float, ...]
    curves: dict[str, list[tuple[str, int, float, int]]]
    """By plan, kept and recomputed: phase, run, seconds, bytes of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFigures:
    """Seconds of recomputing over the planned steps whose size can be told."""

    steps: int
    seconds: float
    """What these steps took."""
    chosen_seconds: float
    static_seconds: float
    """Had the plan of the largest size been used throughout."""
    everything_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A whole report."""

    header: dict[str, Any]
    runs: tuple[str, ...]
    """The block of each run, in forward order."""
    budget_bytes: int
    reserve_bytes: int
    peak_bytes: int
    total_steps: int
    observed_steps: int
    seconds: float
    peak_held_bytes: int
    """The most that the allocator held, where that was read."""
    steps_over: int
    """Planned steps whose peak was seen to be over the budget."""
    recompute_share: float
    """The share of the planned steps' time that recomputing took; as `Stats` has it."""
    worst_shortfall: float | None
    """The most that a peak was under-predicted, as a share of it."""
    mean_excess: float | None
    """By how much peaks were over-predicted on average."""
    x_label: str
    one_way: bool
    """Whether one number tells a size: then what belongs to sizes can be joined by lines."""
    steps: dict[str, list[Any]]
    """Columns, one entry a step shown."""
    sizes: tuple[SizeFigures, ...]
    time: TimeFigures | None
    events: tuple[dict[str, Any], ...]


def contents_of(recording: Recording) -> Contents:
    """Everything that a report of this run shows."""
    header, steps = recording.header, recording.steps
    axis = SizeAxis.of([step.size for step in steps])
    outlook = Outlook.of(recording)
    errors = [
        (step.predicted_bytes - step.peak_bytes) / step.peak_bytes
        for step in recording.planned
        if step.peak_bytes and step.predicted_bytes
    ]
    return Contents(
        header={name: getattr(header, name) for name in header.__slots__},
        runs=_runs(recording, outlook, axis),
        budget_bytes=header.budget_bytes,
        reserve_bytes=steps[-1].reserve_bytes if steps else 0,
        peak_bytes=recording.peak_bytes,
        total_steps=len(steps),
        observed_steps=len(steps) - len(recording.planned),
        seconds=steps[-1].at_seconds + steps[-1].milliseconds / 1e3 - steps[0].at_seconds
        if steps
        else 0.0,
        peak_held_bytes=max((step.held_bytes or 0 for step in steps), default=0),
        steps_over=sum((step.peak_bytes or 0) > header.budget_bytes for step in recording.planned),
        recompute_share=_recompute_share(recording),
        worst_shortfall=max(0.0, -min(errors)) if errors else None,
        mean_excess=sum(max(0.0, e) for e in errors) / len(errors) if errors else None,
        x_label=axis.label,
        one_way=axis.one_way,
        steps=_columns(steps, axis),
        sizes=_sizes(recording, outlook, axis),
        time=_time(recording, outlook),
        events=tuple(
            {"step": e.step, "at": e.at_seconds, "kind": e.kind, "text": e.text}
            for e in recording.events
        ),
    )


@dataclass(frozen=True, slots=True)
class SizeAxis:
    """One number for each input size of a run: what varies, or the product of all that does."""

    shape: Shape | None
    label: str

    @classmethod
    def of(cls, sizes: Sequence[InputSize]) -> SizeAxis:
        if not sizes:
            return cls(None, "input size")
        usual = Counter(size.layout for size in sizes).most_common(1)[0][0]
        shape = Shape.of(list(dict.fromkeys(s for s in sizes if s.layout == usual)))
        if len(shape.symbols) == 1:
            return cls(shape, f"n, of inputs {_pattern(shape, sizes)}")
        if shape.symbols:
            return cls(shape, "product of the dimensions that vary")
        return cls(shape, "input size (all are equal)")

    @property
    def one_way(self) -> bool:
        return self.shape is not None and len(self.shape.symbols) <= 1

    def shows(self, size: InputSize) -> bool:
        """Whether a size has a place on this axis."""
        return self.shape is not None and size.layout == self.shape.layout

    def x(self, size: InputSize) -> int:
        assert self.shape is not None
        product = 1
        for dimension in self.shape.point(size):
            product *= dimension
        return product


def _pattern(shape: Shape, sizes: Sequence[InputSize]) -> str:
    """The shape of the first tensor that varies, with n for what does."""
    constants, at = dict(shape.constants), 0
    leader = shape.symbols[0][0].position
    for _, rank in shape.layout:
        if leader < at + rank:
            names = (constants.get(i, "n") for i in range(at, at + rank))
            return "×".join(map(str, names))
        at += rank
    return "n"


def _columns(steps: Sequence[RecordedStep], axis: SizeAxis) -> dict[str, list[Any]]:
    shown = thinned(steps)
    return {
        "number": [s.number for s in shown],
        "label": [str(s.size) for s in shown],
        "x": [axis.x(s.size) if axis.shows(s.size) else None for s in shown],
        "base": [s.base_bytes for s in shown],
        "predicted": [s.predicted_bytes for s in shown],
        "peak": [s.peak_bytes for s in shown],
        "held": [s.held_bytes for s in shown],
        "plan": [s.plan for s in shown],
        "milliseconds": [s.milliseconds for s in shown],
    }


def thinned(steps: Sequence[RecordedStep], most: int = _MOST_STEPS) -> list[RecordedStep]:
    """All steps, or of a long run the highest of each stretch."""
    if len(steps) <= most:
        return list(steps)
    edges = [len(steps) * i // most for i in range(most + 1)]
    stretches = (steps[a:b] for a, b in itertools.pairwise(edges))
    return [max(stretch, key=_height) for stretch in stretches]


def _height(step: RecordedStep) -> int:
    return step.peak_bytes or step.predicted_bytes or 0


def _runs(recording: Recording, outlook: Outlook, axis: SizeAxis) -> tuple[str, ...]:
    for step in recording.steps:
        pattern = outlook.cost_model.pattern_for(step.size) if axis.shows(step.size) else None
        if pattern is not None:
            blocks = recording.header.blocks
            return tuple(
                blocks[index] + (f" (run {nth + 1})" if nth else "") for index, nth in pattern
            )
    return recording.header.blocks


def _sizes(recording: Recording, outlook: Outlook, axis: SizeAxis) -> tuple[SizeFigures, ...]:
    counts = Counter(step.size for step in recording.steps if axis.shows(step.size))
    known = [(size, outlook.estimate(size)) for size in counts]
    pairs = [(size, estimate) for size, estimate in known if estimate is not None]
    pairs.sort(key=lambda pair: (axis.x(pair[0]), pair[0].dims))
    if len(pairs) > _MOST_SIZES:
        last = len(pairs) - 1
        pairs = [pairs[round(i * last / (_MOST_SIZES - 1))] for i in range(_MOST_SIZES)]
    had = {step.size: step.plan for step in recording.planned if step.has_own_plan}
    budget = recording.header.budget_bytes
    return tuple(
        _size(
            outlook,
            size,
            estimate,
            _plan(outlook, estimate.profile, had.get(size), budget),
            x=axis.x(size),
            steps=counts[size],
        )
        for size, estimate in pairs
    )


def _plan(outlook: Outlook, profile: Profile, had: str | None, budget: int) -> Plan:
    """The plan that steps of this size last had; of a size that was observed, what it would get."""
    if had is None or len(had) != len(profile.runs):
        return outlook.plan(profile, budget)
    choices = tuple(letter == "r" for letter in had)
    return Plan.of(profile, choices, outlook.available(profile, budget))


def _size(
    outlook: Outlook, size: InputSize, estimate: Estimate, plan: Plan, *, x: int, steps: int
) -> SizeFigures:
    profile = estimate.profile
    base, count = outlook.base_bytes(profile), len(profile.runs)
    choices = {"plan": plan.recompute, "kept": (False,) * count, "recomputed": (True,) * count}
    letters = zip(profile.runs, plan.recompute, strict=True)
    return SizeFigures(
        label=str(size),
        at_most_as=None if estimate.at_most_as is None else str(estimate.at_most_as),
        x=x,
        steps=steps,
        base_bytes=base,
        plan="".join("f" if run.fixed else "r" if again else "K" for run, again in letters),
        plan_peak_bytes=base + plan.peak_bytes,
        kept_peak_bytes=base + peak(profile, choices["kept"]),
        recomputed_peak_bytes=base + peak(profile, choices["recomputed"]),
        plan_seconds=plan.recompute_seconds,
        whole_seconds=whole_seconds(profile),
        saved_bytes=tuple(run.saved for run in profile.runs),
        run_seconds=tuple(run.nanoseconds / 1e9 for run in profile.runs),
        curves={
            name: [(m.phase, m.run, m.seconds, base + m.bytes) for m in curve(profile, again)]
            for name, again in choices.items()
        },
    )


def _recompute_share(recording: Recording) -> float:
    pairs = zip(recording.steps, recording.seconds(), strict=True)
    seconds = sum(took for step, took in pairs if step.plan is not None)
    again = sum(step.recompute_milliseconds for step in recording.planned) / 1e3
    return min(1.0, again / seconds) if seconds else 0.0


def _time(recording: Recording, outlook: Outlook) -> TimeFigures | None:
    """What recomputing cost, and what it would have cost with a static plan or without one."""
    profiles = {step.size: outlook.profile(step.size) for step in recording.planned}
    pairs = zip(recording.steps, recording.seconds(), strict=True)
    took = {id(step): seconds for step, seconds in pairs}
    told = [step for step in recording.planned if profiles[step.size] is not None]
    if not told:
        return None
    budget, static = recording.header.budget_bytes, Static(Optimal())
    known = {size: profile for size, profile in profiles.items() if profile is not None}
    largest = max(known.values(), key=lambda profile: sum(run.saved for run in profile.runs))
    frozen = static.plan(largest, outlook.available(largest, budget)).recompute
    return TimeFigures(
        steps=len(told),
        seconds=sum(took[id(step)] for step in told),
        chosen_seconds=sum(step.recompute_milliseconds for step in told) / 1e3,
        static_seconds=sum(
            recompute_nanoseconds(known[step.size], frozen) / 1e9
            for step in told
            if len(known[step.size].runs) == len(frozen)
        ),
        everything_seconds=sum(whole_seconds(known[step.size]) for step in told),
    )
