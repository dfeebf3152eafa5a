"""A recorded run, read back: its steps, its events, and all that the session had learned."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mimose.errors import ArgumentError
from mimose.inputs import InputSize, Layout
from mimose.knowledge import Knowledge
from mimose.observations import StepObservation
from mimose.pace import Pace
from mimose.recording import FORMAT, Header


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

    def knowledge(self) -> Knowledge:
        """What the session knew at the end, rebuilt."""
        knowledge = Knowledge()
        for observation in self.observations:
            knowledge.of(born=observation.gradients_born).learn(observation)
        return knowledge

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
        lines = file.read().splitlines()
    if not lines:
        raise ArgumentError(f"{path} is empty: no training step has been recorded in it yet")
    if not is_recording(lines[0]):
        raise ArgumentError(
            f'{path} is not a recording: write one with auto_checkpoint(..., record="run.jsonl")'
        )
    reader = _Reader(_header(lines[0], path))
    for line in lines[1:]:
        reader.take(line)
    return reader.recording


def _header(line: str, path: str | os.PathLike[str]) -> Header:
    try:
        values: dict[str, Any] = json.loads(line)["recording"]
    except ValueError:
        raise ArgumentError(f"{path} was cut within its first line: nothing can be read") from None
    if values.get("format") != FORMAT:
        raise ArgumentError(
            f"{path} has format {values.get('format')}, and this mimose reads {FORMAT}: read it "
            f"with mimose {values.get('mimose_version')}"
        )
    try:
        return Header(**{**values, "blocks": tuple(values["blocks"])})
    except (KeyError, TypeError):
        raise ArgumentError(f"{path} has a first line that no mimose wrote") from None


class _Reader:
    """Takes one line after another; leaves out what is not whole."""

    def __init__(self, header: Header) -> None:
        self.recording = Recording(header)
        self._layouts: dict[int, Layout] = {}
        self._chapters: dict[int, list[StepObservation]] = {}
        self._reserve = 0

    def take(self, line: str) -> None:
        try:
            values: dict[str, Any] = json.loads(line)
            if "step" in values and "size" in values:
                self.recording.steps.append(self._step(values))
            elif "observation" in values:
                observation = StepObservation.from_plain(values["observation"])
                if values.get("anew"):
                    self.recording.observations.clear()
                self.recording.observations.append(observation)
            elif "timed" in values:
                timed = StepObservation.from_plain(values["timed"])
                _take_times(self._chapters.get(values["in"], []), timed)
            elif "regime" in values:
                self.recording.observations = self._chapters.setdefault(values["regime"], [])
            elif "layout" in values:
                self._layouts[values["layout"]] = _layout(values["of"])
            elif "event" in values:
                self.recording.events.append(_event(values))
        except (ValueError, KeyError, TypeError):
            return

    def _step(self, values: dict[str, Any]) -> RecordedStep:
        self._reserve = values.get("reserve", self._reserve)
        layout = self._layouts[values.get("layout", 0)]
        plan, predicted = values.get("plan"), values.get("predicted")
        if plan == "":  # after memory ran out: whatever runs is recomputed, nothing is predicted
            plan, predicted = "r" * len(self.recording.header.blocks), None
        return RecordedStep(
            number=values["step"],
            at_seconds=values["at"],
            size=InputSize(layout, tuple(values["size"])),
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
        kind=values["event"], at_seconds=values["at"], step=values["step"], text=values["text"]
    )
