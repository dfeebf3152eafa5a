"""One timed run: a contestant, a task, a budget, from the first step to the last.

The device is waited for once before the first step and once after the last, or around each leg if
contestants take turns; times of single steps come from events that are read afterwards. Whatever a
contestant does while training (observing, planning, compiling) is in its time. A step that runs out
of memory is recorded and skipped.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mimose.bench.arena import Trainee, synchronize
from mimose.bench.batches import BatchShape
from mimose.bench.contestant import Contestant, Match, StepNote
from mimose.training import spare_bytes


@dataclass(slots=True)
class Steps:
    """What was seen of each step: one list a quantity, as long as the run."""

    rows: list[int] = field(default_factory=list)
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    predicted_bytes: list[int | None] = field(default_factory=list)
    untrusted_bytes: list[int | None] = field(default_factory=list)
    """Empty in older files."""
    real_bytes: list[int | None] = field(default_factory=list)
    recomputed: list[int | None] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    out_of_memory: list[bool] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, measured; or the reason why there is none."""

    seconds: float = 0.0
    """All steps, observing and planning included."""
    steps: Steps = field(default_factory=Steps)
    spent: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing: str | None = None

    @property
    def out_of_memory(self) -> int:
        return sum(self.steps.out_of_memory)


class Baton(Protocol):
    """Goes from one contestant to the next: who has it runs."""

    def pass_on(self) -> None:
        """Give it away, and wait until it is back."""


def run(kind: type[Contestant], match: Match, baton: Baton | None = None) -> Run:
    """Train with a contestant from the common start; say why where it cannot."""
    reason = kind.missing(match)
    if reason is not None:
        return Run(missing=reason)
    with warnings.catch_warnings(record=True) as caught, match.arena.trainee() as trainee:
        warnings.simplefilter("always")
        trainee.warm_up(min(match.arena.shapes))
        contestant = kind(match)
        try:
            contestant.attach(trainee)
            seconds, steps = _timed(trainee, contestant, match, baton)
            spent = contestant.spent()
        except (RuntimeError, NotImplementedError) as error:  # a compiler that gives up, say
            return Run(missing=f"{type(error).__name__}: {_first_line(error)}")
        finally:
            contestant.detach()
    messages = dict.fromkeys(_first_line(w.message) for w in caught)
    return Run(seconds=seconds, steps=steps, spent=spent, warnings=list(messages)[:8])


def _timed(
    trainee: Trainee, contestant: Contestant, match: Match, baton: Baton | None
) -> tuple[float, Steps]:
    lap, watch = _Lap(trainee, contestant), _Watch(match.arena.device)
    leg = match.arena.conditions.leg
    if contestant.capped:
        assert match.budget_bytes is not None
        trainee.meter.limit(match.budget_bytes - spare_bytes(match.budget_bytes, trainee.meter))
    with _frozen():
        if baton is not None:
            baton.pass_on()
        watch.start()
        for number, shape in enumerate(match.arena.shapes):
            if baton is not None and leg and number and number % leg == 0:
                watch.stop()
                baton.pass_on()
                watch.start()
            lap.step(shape, number)
        watch.stop()
    trainee.meter.limit(None)
    return watch.seconds, lap.finished()


@contextmanager
def _frozen() -> Iterator[None]:
    """Or a search for garbage among all of torch's objects hits somebody by chance.

    A program that has frozen its objects itself keeps them frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Watch:
    """Seconds between starts and stops, at both of which the device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self.seconds = 0.0

    def start(self) -> None:
        synchronize(self._device)
        self._began = time.perf_counter()

    def stop(self) -> None:
        synchronize(self._device)
        self.seconds += time.perf_counter() - self._began


class _Lap:
    """The steps of one run."""

    def __init__(self, trainee: Trainee, contestant: Contestant) -> None:
        self._trainee, self._contestant = trainee, contestant
        self._steps = Steps()
        self._marks: list[tuple[Any, Any]] = []
        self._losses: list[torch.Tensor | None] = []

    def step(self, shape: BatchShape, number: int) -> None:
        meter, clock = self._trainee.meter, self._trainee.arena.clock
        meter.reset_peak()
        begun = clock.mark()
        self._contestant.step_begins(shape)
        loss = self._tried(shape, number)
        note = StepNote() if loss is None else self._contestant.step_over()
        self._marks.append((begun, clock.mark()))
        self._losses.append(loss)
        reading = meter.read()
        peak = max(reading.peak, note.peak_bytes)
        held = max(reading.peak_held, note.held_bytes, peak)
        self._note(shape, peak, held, note, loss is None)

    def _tried(self, shape: BatchShape, number: int) -> torch.Tensor | None:
        try:
            return self._trainee.step(shape, number)
        except torch.OutOfMemoryError:
            pass  # tidied up below, where the exception no longer holds on to the step's frames
        self._trainee.recover()
        return None

    def _note(self, shape: BatchShape, peak: int, held: int, note: StepNote, failed: bool) -> None:
        steps = self._steps
        steps.rows.append(shape.rows)
        steps.lengths.append(shape.lengths)
        steps.peak_bytes.append(peak)
        steps.held_bytes.append(held)
        steps.predicted_bytes.append(note.predicted_bytes)
        steps.untrusted_bytes.append(note.untrusted_bytes)
        steps.real_bytes.append(note.real_bytes)
        steps.recomputed.append(note.recomputed)
        steps.observed.append(note.observed)
        steps.out_of_memory.append(failed)

    def finished(self) -> Steps:
        """Everything, now that the device is done and can be asked."""
        seconds = self._trainee.arena.clock.seconds
        times = (seconds(begun, ended) or 0.0 for begun, ended in self._marks)
        self._steps.milliseconds = [round(1e3 * known, 4) for known in times]
        values = (None if loss is None else float(loss) for loss in self._losses)
        self._steps.loss = [v if v is None or math.isfinite(v) else None for v in values]
        return self._steps


def _first_line(message: object) -> str:
    return (str(message).strip().splitlines() or [type(message).__name__])[0][:300]
