"""The data of a report, shared by the page, the Markdown text and the picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mimose.costs import Option, Profile, extra_nanoseconds
from mimose.planning import Optimal, Static
from mimose.reporting.outlook import Outlook, whole_seconds
from mimose.reporting.page.size_axis import SizeAxis
from mimose.reporting.page.size_figures import SizeFigures, figures_by_size
from mimose.reporting.reader import RecordedStep, Recording

_MOST_STEPS = 4000
_MOST_EVICTIONS = 20
"""Of more steps with evictions, the events list only the first ones and the number of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFigures:
    """Recompute time over all planned steps whose costs can be predicted.

    All of it by the costs that were known at the end of the run, so that the plans can be compared.
    """

    steps: int
    seconds: float
    """Total time of these steps."""
    chosen_seconds: float
    """Under the plans that were used, with waiting for the host."""
    static_seconds: float
    """If all steps had used the plan of the largest size."""
    everything_seconds: float
    """If everything had been recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run as a whole."""

    budget_bytes: int
    reserve_bytes: int
    peak_bytes: int
    total_steps: int
    observed_steps: int
    seconds: float
    peak_held_bytes: int
    """The most that the allocator was measured to hold."""
    steps_over: int
    """Planned steps whose measured peak was over the budget."""
    planned_peak_bytes: int
    """The highest measured peak of the planned steps; 0 if none was measured."""
    evictions: int
    """Kept runs whose activations were dropped because memory ran short."""
    recoveries: int
    """How often memory ran out and a block, or a whole step, was run again."""
    retries: int
    """How often a whole step was run again."""
    recompute_share: float
    """Share of the planned steps' time spent on recomputing, as in `Stats`."""
    worst_shortfall: float | None
    """The largest underestimate of a peak, as a share of the real peak."""
    mean_excess: float | None
    """The mean overestimate of peaks, as a share of the real peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A whole report."""

    header: dict[str, Any]
    summary: Summary
    runs: tuple[str, ...]
    """The block of each run, in forward order."""
    x_label: str
    one_way: bool
    """Whether at most one dimension varies, so that charts over sizes can draw lines."""
    steps: dict[str, list[Any]]
    """Columns with one entry per step shown."""
    sizes: tuple[SizeFigures, ...]
    time: TimeFigures | None
    events: tuple[dict[str, Any], ...]

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON, with the summary's among the others."""
        values = asdict(self)
        return {**values.pop("summary"), **values}


def contents_of(recording: Recording) -> Contents:
    """The contents of a report on this run."""
    header, steps = recording.header, recording.steps
    axis = SizeAxis.of([step.size for step in steps])
    outlook = Outlook.of(recording)
    return Contents(
        header={name: getattr(header, name) for name in header.__slots__},
        summary=_summary(recording),
        runs=_runs(recording, outlook, axis),
        x_label=axis.label,
        one_way=axis.one_way,
        steps=_columns(steps, axis),
        sizes=figures_by_size(recording, outlook, axis),
        time=_time(recording, outlook),
        events=_events(recording),
    )


def _summary(recording: Recording) -> Summary:
    steps, budget_bytes = recording.steps, recording.header.budget_bytes
    errors = [
        (step.predicted_bytes - step.peak_bytes) / step.peak_bytes
        for step in recording.planned
        if step.peak_bytes and step.predicted_bytes
    ]
    return Summary(
        budget_bytes=budget_bytes,
        reserve_bytes=steps[-1].reserve_bytes if steps else 0,
        peak_bytes=recording.peak_bytes,
        total_steps=len(steps),
        observed_steps=len(steps) - len(recording.planned),
        seconds=steps[-1].at_seconds + steps[-1].milliseconds / 1e3 - steps[0].at_seconds
        if steps
        else 0.0,
        peak_held_bytes=max((step.held_bytes or 0 for step in steps), default=0),
        steps_over=sum((step.peak_bytes or 0) > budget_bytes for step in recording.planned),
        planned_peak_bytes=max((step.peak_bytes or 0 for step in recording.planned), default=0),
        evictions=sum(step.evictions for step in steps),
        recoveries=recording.recoveries,
        retries=recording.retries,
        recompute_share=_recompute_share(recording),
        worst_shortfall=max(0.0, -min(errors)) if errors else None,
        mean_excess=sum(max(0.0, e) for e in errors) / len(errors) if errors else None,
    )


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
        "evictions": [s.evictions for s in shown],
        "milliseconds": [s.milliseconds for s in shown],
    }


def thinned(steps: Sequence[RecordedStep], most: int = _MOST_STEPS) -> list[RecordedStep]:
    """All steps or, in a long run, the one with the highest peak in each interval."""
    if len(steps) <= most:
        return list(steps)
    edges = [len(steps) * i // most for i in range(most + 1)]
    intervals = (steps[a:b] for a, b in itertools.pairwise(edges))
    return [max(part, key=lambda s: s.peak_bytes or s.predicted_bytes or 0) for part in intervals]


def _runs(recording: Recording, outlook: Outlook, axis: SizeAxis) -> tuple[str, ...]:
    for step in recording.steps:
        prediction = outlook.cost_model.predict(step.size) if axis.shows(step.size) else None
        if prediction is not None:
            blocks = recording.header.blocks
            return tuple(
                blocks[index] + (f" (run {nth + 1})" if nth else "")
                for index, nth in prediction.pattern
            )
    return recording.header.blocks


def _events(recording: Recording) -> tuple[dict[str, Any], ...]:
    """The recorded events, and the steps in which kept runs were evicted."""
    events = [
        {"step": e.step, "at": e.at_seconds, "kind": e.kind, "text": e.text}
        for e in recording.events
    ]
    evicting = [step for step in recording.steps if step.evictions]
    for number, step in enumerate(evicting[:_MOST_EVICTIONS], 1):
        text = f"{counted(step.evictions, 'kept run')} evicted because memory ran short"
        if number == _MOST_EVICTIONS < len(evicting):
            text += f"; runs were evicted in {counted(len(evicting) - number, 'later step')} too"
        events.append(
            {"step": step.number, "at": step.at_seconds, "kind": "eviction", "text": text}
        )
    return tuple(sorted(events, key=lambda event: event["at"]))


def counted(number: int, word: str) -> str:
    """The number and the word, in the plural unless the number is 1."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def _recompute_share(recording: Recording) -> float:
    pairs = zip(recording.steps, recording.seconds(), strict=True)
    seconds = sum(took for step, took in pairs if step.plan is not None)
    recompute = sum(step.recompute_milliseconds for step in recording.planned) / 1e3
    return min(1.0, recompute / seconds) if seconds else 0.0


def _time(recording: Recording, outlook: Outlook) -> TimeFigures | None:
    """Recompute time under mimose's plans, under a static plan, and with everything recomputed."""
    profiles = {step.size: outlook.profile(step.size) for step in recording.planned}
    pairs = zip(recording.steps, recording.seconds(), strict=True)
    took = {id(step): seconds for step, seconds in pairs}
    known = {size: profile for size, profile in profiles.items() if profile is not None}
    chosen = [
        (step, seconds)
        for step in recording.planned
        if step.size in known and (seconds := _chosen_seconds(step, known[step.size])) is not None
    ]
    if not chosen:
        return None
    steps = [step for step, _ in chosen]
    budget, static = recording.header.budget_bytes, Static(Optimal())
    largest = max(known.values(), key=lambda profile: sum(run.saved for run in profile.runs))
    static_choices = static.plan(largest, outlook.available(largest, budget)).choices
    return TimeFigures(
        steps=len(steps),
        seconds=sum(took[id(step)] for step in steps),
        chosen_seconds=sum(seconds for _, seconds in chosen),
        static_seconds=sum(
            extra_nanoseconds(known[step.size], static_choices) / 1e9
            for step in steps
            if len(known[step.size].runs) == len(static_choices)
        ),
        everything_seconds=sum(whole_seconds(known[step.size]) for step in steps),
    )


def _chosen_seconds(step: RecordedStep, profile: Profile) -> float | None:
    """The time that the step's plan adds; None if the plan is for other runs than predicted."""
    choices = Option.of_letters(step.plan or "")
    if len(choices) != len(profile.runs):
        return None
    return extra_nanoseconds(replace(profile, link=step.link), choices) / 1e9
