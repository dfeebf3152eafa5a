"""A recorded run, read back: its steps, its events, and all that the session had learned."""

from __future__ import annotations

import itertools
import json
import operator
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mimose.costs import InputSize, Layout, Pace, StepObservation
from mimose.errors import ArgumentError
from mimose.estimation import CostModel
from mimose.reporting.recording import FORMAT, Header


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step, as its line tells it."""

    number: int
    at_seconds: float
    """From the start of the recording to the step's first block."""
    size: InputSize
    plan: str | None
    """A letter a run: K kept, r recomputed; None if the step was observed."""
    base_bytes: int
    at_most_bytes: int | None
    """What its peak was known not to exceed, where it could not be predicted."""
    predicted_bytes: int | None
    """The predicted peak; None where there was only an upper bound, or nothing."""
    peak_bytes: int | None
    """None where nobody could see it: a peak below an earlier one, on a device that others read."""
    held_bytes: int | None
    """The most that the allocator has held by then; None for observed steps, and far from the
    limit for most."""
    milliseconds: float
    """From the first block's forward to the end of the backward, as the host sees it."""
    recompute_milliseconds: float
    planning_microseconds: float
    reserve_bytes: int

    @property
    def has_own_plan(self) -> bool:
        """Whether its plan was made for its size, not for want of one after memory ran out."""
        return (self.predicted_bytes or self.at_most_bytes) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that people should know."""

    kind: str
    at_seconds: float
    step: int
    text: str


@dataclass(slots=True)
class Recording:
    """A run, read back."""

    header: Header
    steps: list[RecordedStep] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    observations: list[StepObservation] = field(default_factory=list)
    """What was learned in the regime that the run ended in."""
    unreadable: list[int] = field(default_factory=list)
    """Lines that make no sense, by number; not a last one that was cut."""

    @property
    def planned(self) -> list[RecordedStep]:
        """The steps that ran under a plan."""
        return [step for step in self.steps if step.plan is not None]

    def seconds(self) -> list[float]:
        """What each step took, until the next one began; pauses between steps left out."""
        pace, took = Pace(), []
        for step, following in itertools.pairwise(self.steps):
            whole = following.at_seconds - step.at_seconds
            took.append(pace.seconds(step.milliseconds / 1e3, whole))
        return [*took, *(step.milliseconds / 1e3 for step in self.steps[-1:])]

    def cost_model(self) -> CostModel:
        """What the session knew at the end, rebuilt."""
        cost_model = CostModel()
        for observation in self.observations:
            cost_model.of(born=observation.gradients_born).learn(observation)
        return cost_model

    @property
    def remark(self) -> str:
        """What people should know of a file that is damaged; nothing as a rule."""
        if not self.unreadable:
            return ""
        shown = ", ".join(map(str, self.unreadable[:5])) + ("…" if self.unreadable[5:] else "")
        one = len(self.unreadable) == 1
        does = "line {} makes no sense and is" if one else "lines {} make no sense and are"
        return f"{does.format(shown)} left out"

    @property
    def peak_bytes(self) -> int:
        """The highest peak that was seen."""
        return max((step.peak_bytes or step.base_bytes for step in self.steps), default=0)


def is_recording(first_line: str) -> bool:
    """Whether a file that begins with this line is a recording."""
    return first_line.startswith('{"recording":')


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, also one that is still being written or was cut."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    lines = text.splitlines()
    if not lines:
        raise ArgumentError(f"{path} is empty: no training step has been recorded in it yet")
    if not is_recording(lines[0]):
        raise ArgumentError(
            f'{path} is not a recording: write one with auto_checkpoint(..., record="run.jsonl")'
        )
    reader = _Reader(_header(lines[0], path))
    for number, line in enumerate(lines[1:], 2):
        reader.take(number, line)
    recording = reader.recording
    if recording.unreadable[-1:] == [len(lines)] and not text.endswith("\n"):
        recording.unreadable.pop()  # still being written, or cut
    return recording


def _header(line: str, path: str | os.PathLike[str]) -> Header:
    try:
        values: dict[str, Any] = json.loads(line)["recording"]
    except ValueError:
        raise ArgumentError(f"{path} was cut within its first line: nothing can be read") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{path} has a first line that no mimose wrote")
    if values.get("format") != FORMAT:
        raise ArgumentError(
            f"{path} has format {values.get('format')}, and this mimose reads {FORMAT}: read it "
            f"with mimose {values.get('mimose_version')}"
        )
    try:
        header = Header(**{**values, "blocks": tuple(map(str, values["blocks"]))})
        numbers = header.budget_bytes, header.parameter_bytes, header.gradient_bytes
        if not all(map(_is_number, numbers)) or header.budget_bytes <= 0:
            raise ValueError(f"{numbers} are no bytes")
        return header
    except (KeyError, TypeError, ValueError):
        raise ArgumentError(f"{path} has a first line that no mimose wrote") from None


class _Reader:
    """Takes one line after another; leaves out what is not whole."""

    def __init__(self, header: Header) -> None:
        self.recording = Recording(header)
        self._blocks = len(header.blocks)
        self._layouts: dict[int, Layout] = {}
        self._cost_models: dict[int, list[StepObservation]] = {}
        self._reserve = 0

    def take(self, number: int, line: str) -> None:
        try:
            values: dict[str, Any] = json.loads(line)
            if not isinstance(values, dict):
                raise TypeError(f"{line!r} is no object")
            if "step" in values and "size" in values:
                self.recording.steps.append(self._step(values))
            elif "observation" in values:
                observation = StepObservation.from_plain(values["observation"], self._blocks)
                if values.get("anew"):
                    self.recording.observations.clear()
                self.recording.observations.append(observation)
            elif "timed" in values:
                timed = StepObservation.from_plain(values["timed"], self._blocks)
                _take_times(self._cost_models.get(values["in"], []), timed)
            elif "regime" in values:
                self.recording.observations = self._cost_models.setdefault(values["regime"], [])
            elif "layout" in values:
                self._layouts[values["layout"]] = _layout(values["of"])
            elif "event" in values:
                self.recording.events.append(_event(values))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.recording.unreadable.append(number)

    def _step(self, values: dict[str, Any]) -> RecordedStep:
        numbers = {key: value for key, value in values.items() if key not in ("size", "plan")}
        if not all(
            _is_number(value) or (value is None and key in _UNSEEN)
            for key, value in numbers.items()
        ):
            raise ValueError(f"not all of these are numbers: {numbers}")
        layout = self._layouts[values.get("layout", 0)]
        if len(values["size"]) != sum(rank for _, rank in layout):
            raise ValueError(f"{values['size']} is no size of {layout}")
        self._reserve = values.get("reserve", self._reserve)
        plan, predicted = values.get("plan"), values.get("predicted")
        if not set(plan or "") <= set("Kr"):
            raise ValueError(f"{plan!r} is no plan")
        if plan == "":  # after memory ran out: whatever runs is recomputed, nothing is predicted
            plan, predicted = "r" * len(self.recording.header.blocks), None
        return RecordedStep(
            number=values["step"],
            at_seconds=values["at"],
            size=InputSize(layout, tuple(map(operator.index, values["size"]))),
            plan=plan,
            base_bytes=values["base"],
            at_most_bytes=values.get("at_most"),
            predicted_bytes=predicted,
            peak_bytes=values["peak"],
            held_bytes=values["held"],
            milliseconds=values["ms"],
            recompute_milliseconds=values.get("again_ms", 0.0),
            planning_microseconds=values["planning_us"],
            reserve_bytes=self._reserve,
        )


_UNSEEN = ("peak", "held")
"""What may be null in a step's line: nobody could see it."""


def _is_number(value: Any) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < 1 << 62


def _take_times(learned: list[StepObservation], timed: StepObservation) -> None:
    """The last observation of this size, kind and these runs takes as long as this one says."""
    for at in reversed(range(len(learned))):
        former = learned[at]
        if _key(former) == _key(timed):
            learned[at] = former.timed_as(timed)
            return


def _key(seen: StepObservation) -> tuple[Hashable, ...]:
    return seen.size, seen.pattern, seen.gradients_born


def _layout(pairs: Sequence[tuple[str, int]]) -> Layout:
    return tuple((name, rank) for name, rank in pairs)


def _event(values: dict[str, Any]) -> Event:
    return Event(
        kind=str(values["event"]),
        at_seconds=float(values["at"]),
        step=int(values["step"]),
        text=str(values["text"]),
    )
