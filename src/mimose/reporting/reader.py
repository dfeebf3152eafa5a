"""Read a recorded run: its steps, its events and its observations."""

from __future__ import annotations

import itertools
import json
import operator
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mimose.costs import InputSize, Layout, Link, Option, Pace, StepObservation
from mimose.errors import ArgumentError
from mimose.estimation import CostModel
from mimose.reporting.recording import READABLE, Header

NOTHING_WRITTEN = (
    "{path} is empty: no step has been written yet. Steps are written after 64 lines or two "
    "seconds of training, and by handle.detach()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of a recording."""

    number: int
    at_seconds: float
    """From the start of the recording to the step's first block."""
    size: InputSize
    plan: str | None
    """One letter per run: K kept, H saved on the host, r recomputed, h recomputed from an input on
    the host; None if the step was observed."""
    observed: str | None
    """The same letters for an observed step; None if everything was recomputed, or the step was
    not observed."""
    base_bytes: int
    at_most_bytes: int | None
    """Upper bound of the peak, if the peak could not be predicted."""
    predicted_bytes: int | None
    """The predicted peak; None if there was only an upper bound, or neither."""
    peak_bytes: int | None
    """The real peak; None if it was below an earlier one and CUDA's statistics were not reset."""
    held_bytes: int | None
    """The most that the allocator has held so far; None if it was not read: in observed steps, and
    in most steps far below the limit."""
    milliseconds: float
    """Host time from the first block's forward to the end of the backward."""
    recompute_milliseconds: float
    """Predicted time that the plan adds: recomputes, and waiting for transfers."""
    reserve_bytes: int
    link: Link | None = None
    """The link to host memory; None if plans did without."""
    evictions: int = 0
    """Kept runs whose activations were evicted."""

    @property
    def has_own_plan(self) -> bool:
        """Whether the plan was made for this size; false for the fallback after out of memory."""
        return (self.predicted_bytes or self.at_most_bytes) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of the event log."""

    kind: str
    at_seconds: float
    step: int
    text: str


@dataclass(slots=True)
class Recording:
    """A recorded run."""

    header: Header
    steps: list[RecordedStep] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    observations: list[StepObservation] = field(default_factory=list)
    """The observations of the regime in which the run ended."""
    link: Link | None = None
    """The link to host memory at the end of the run; None if plans did without."""
    recoveries: int = 0
    """How often memory ran out and a block, or a whole step, was run again."""
    retries: int = 0
    """How often a whole step was run again."""
    unreadable: list[int] = field(default_factory=list)
    """Numbers of invalid lines; a truncated last line is not counted."""

    @property
    def planned(self) -> list[RecordedStep]:
        """The steps that ran under a plan."""
        return [step for step in self.steps if step.plan is not None]

    def seconds(self) -> list[float]:
        """Time of each step until the start of the next one, without pauses."""
        pace, took = Pace(), []
        for step, following in itertools.pairwise(self.steps):
            whole = following.at_seconds - step.at_seconds
            took.append(pace.seconds(step.milliseconds / 1e3, whole))
        return [*took, *(step.milliseconds / 1e3 for step in self.steps[-1:])]

    def cost_model(self) -> CostModel:
        """The cost model at the end of the run, rebuilt from the observations."""
        cost_model = CostModel()
        for observation in self.observations:
            cost_model.learn(observation)
        return cost_model

    @property
    def remark(self) -> str:
        """Which lines are invalid; empty if none is."""
        if not self.unreadable:
            return ""
        shown = ", ".join(map(str, self.unreadable[:5])) + ("…" if self.unreadable[5:] else "")
        return f"skipped invalid line{'s' if self.unreadable[1:] else ''} {shown}"

    @property
    def peak_bytes(self) -> int:
        """The highest measured peak."""
        return max((step.peak_bytes or step.base_bytes for step in self.steps), default=0)


def is_recording(first_line: str) -> bool:
    """Whether a file with this first line is a recording."""
    return first_line.startswith('{"recording":')


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, even if it is truncated or still being written."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    lines = text.splitlines()
    if not lines:
        raise ArgumentError(NOTHING_WRITTEN.format(path=path))
    if not is_recording(lines[0]):
        raise ArgumentError(
            f'{path} is not a recording: make one with auto_checkpoint(..., record="run.jsonl")'
        )
    reader = _Reader(_header(lines[0], path))
    for number, line in enumerate(lines[1:], 2):
        reader.read(number, line)
    recording = reader.recording
    if recording.unreadable[-1:] == [len(lines)] and not text.endswith("\n"):
        recording.unreadable.pop()  # truncated, or still being written
    return recording


def _header(line: str, path: str | os.PathLike[str]) -> Header:
    try:
        values: dict[str, Any] = json.loads(line)["recording"]
    except ValueError:
        raise ArgumentError(
            f"{path} is truncated in its first line: nothing to read. {_RECORD_AGAIN}"
        ) from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{path} has an invalid header in its first line. {_RECORD_AGAIN}")
    if values.get("format") not in READABLE:
        readable = ", ".join(map(str, READABLE))
        raise ArgumentError(
            f"{path} has format {values.get('format')}, but this version of mimose reads formats "
            f"{readable}: read it with the version that recorded it "
            f"({values.get('mimose_version')}), or record the run again"
        )
    try:
        header = Header(**{**values, "blocks": tuple(map(str, values["blocks"]))})
        numbers = header.budget_bytes, header.parameter_bytes, header.gradient_bytes
        if not all(map(_is_number, numbers)) or header.budget_bytes <= 0:
            raise ValueError(f"{numbers} are not numbers of bytes")
        return header
    except (KeyError, TypeError, ValueError):
        raise ArgumentError(
            f"{path} has an invalid header in its first line. {_RECORD_AGAIN}"
        ) from None


def refuse_without_steps(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Raise if no step was recorded, or if none can be read."""
    if recording.steps:
        return
    if not recording.unreadable:
        raise ArgumentError(f"{path} has no finished steps yet: train a little longer")
    lines = recording.unreadable
    shown = ", ".join(map(str, lines[:3])) + (" …" if lines[3:] else "")
    what = (
        f"{len(lines)} lines cannot be read ({shown})"
        if lines[1:]
        else f"line {shown} cannot be read"
    )
    raise ArgumentError(f"{path}: {what} and no step is left: the file is damaged. {_RECORD_AGAIN}")


class _Reader:
    """Parses the lines after the header and notes which are invalid."""

    def __init__(self, header: Header) -> None:
        self.recording = Recording(header)
        self._blocks = len(header.blocks)
        self._layouts: dict[int, Layout] = {}
        self._cost_models: dict[int, list[StepObservation]] = {}
        self._reserve = 0

    def read(self, number: int, line: str) -> None:
        try:
            values: dict[str, Any] = json.loads(line)
            if not isinstance(values, dict):
                raise TypeError(f"{line!r} is not a JSON object")
            if "step" in values and "event" not in values:
                self.recording.steps.append(self._step(values))
            elif "observation" in values:
                observation = StepObservation.from_plain(values["observation"], self._blocks)
                if values.get("anew"):
                    self.recording.observations.clear()
                self.recording.observations.append(observation)
            elif "timed" in values:
                timed = StepObservation.from_plain(values["timed"], self._blocks)
                _set_times(self._cost_models.get(values["in"], []), timed)
            elif "link" in values:
                link = values["link"]
                self.recording.link = None if link is None else Link.from_plain(link)
            elif "regime" in values:
                self.recording.observations = self._cost_models.setdefault(values["regime"], [])
            elif "layout" in values:
                self._layouts[values["layout"]] = _layout(values["of"])
            elif "ran_out" in values:
                self.recording.recoveries += 1
            elif "retried" in values:
                self.recording.retries += 1
            elif "event" in values:
                self.recording.events.append(_event(values))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.recording.unreadable.append(number)

    def _step(self, values: dict[str, Any]) -> RecordedStep:
        numbers = {
            key: value for key, value in values.items() if key not in ("size", "plan", "observed")
        }
        if not all(
            _is_number(value) or (value is None and key in _NULLABLE)
            for key, value in numbers.items()
        ):
            raise ValueError(f"not all of these are numbers: {numbers}")
        layout = self._layouts[values.get("layout", 0)]
        if len(values["size"]) != sum(rank for _, rank in layout):
            raise ValueError(f"{values['size']} is not a size of {layout}")
        self._reserve = values.get("reserve", self._reserve)
        plan, predicted = values.get("plan"), values.get("predicted")
        observed = values.get("observed")
        if not set((plan or "") + (observed or "")) <= _LETTERS:
            raise ValueError(f"{plan or observed!r} is not a plan")
        if plan == "":  # the fallback after memory ran out: recompute all, without a prediction
            plan, predicted = "r" * len(self.recording.header.blocks), None
        return RecordedStep(
            number=values["step"],
            at_seconds=values["at"],
            size=InputSize(layout, tuple(map(operator.index, values["size"]))),
            plan=plan,
            observed=observed,
            base_bytes=values["base"],
            at_most_bytes=values.get("at_most"),
            predicted_bytes=predicted,
            peak_bytes=values["peak"],
            held_bytes=values["held"],
            milliseconds=values["ms"],
            recompute_milliseconds=values.get("again_ms", 0.0),
            reserve_bytes=self._reserve,
            link=self.recording.link,
            evictions=values.get("evicted", 0),
        )


_RECORD_AGAIN = 'Record the run again: auto_checkpoint(..., record="run.jsonl")'
_LETTERS = {option.letter for option in Option}
_NULLABLE = ("peak", "held")
"""Measurements of a step that may be null."""


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < 1 << 62


def _set_times(observations: list[StepObservation], timed: StepObservation) -> None:
    """Copy the times to the last observation of the same size, runs and kind of step."""
    for at in reversed(range(len(observations))):
        if _key(observations[at]) == _key(timed):
            observations[at] = observations[at].timed_as(timed)
            return


def _key(observation: StepObservation) -> tuple[Hashable, ...]:
    return observation.size, observation.pattern, observation.allocates


def _layout(pairs: Sequence[tuple[str, int]]) -> Layout:
    return tuple((name, rank) for name, rank in pairs)


def _event(values: dict[str, Any]) -> Event:
    return Event(
        kind=str(values["event"]),
        at_seconds=float(values["at"]),
        step=int(values["step"]),
        text=str(values["text"]),
    )
