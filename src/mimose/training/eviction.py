"""Evict instead of fail: drop kept activations when a step takes more memory than predicted.

In steps whose prediction is not trusted, as many kept blocks hold their activations in frames of
mimose as may have to be dropped. Memory is read before each block's forward, before the head, and
when the backward reaches such a block. If the expected rise until the next reading would not fit,
kept activations are dropped, and their blocks are recomputed in the backward. Activations with the
least recompute time per byte go first. Late eviction costs no more than early eviction, and more is
known by then. The idea is DTR's, applied to whole blocks, as a safety net under the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mimose.costs import Levels, Moments, Option, Profile, Run, costs_of
from mimose.estimation import Proportions
from mimose.execution import Frame, Listener
from mimose.memory import Meter
from mimose.training.collector import Collector


@dataclass(slots=True)
class _Held:
    """A run whose activations may be evicted."""

    run: int
    frame: weakref.ref[Frame]
    nanoseconds_per_byte: float

    @property
    def can_be_evicted(self) -> bool:
        frame = self.frame()
        return frame is not None and frame.can_be_evicted


class _Growth:
    """How much less than predicted the forwards of runs have added to the memory in use.

    Predictions that are not trusted tend to be too high. If the memory of a run was proportional
    to the growth of an earlier run in every observation, the evictor can expect less.
    """

    def __init__(self, proportions: Proportions) -> None:
        self._proportions = proportions
        self._levels: list[int] = []
        self._kept: list[bool] = []
        self._shortfalls: dict[int, int] = {}
        """By position of the run: the bytes by which it grew less than predicted."""
        self._last: tuple[int, int] | None = None
        self.came_free = 0
        """Bytes evicted so far."""

    def expect(self, levels: Levels, choices: Iterable[Option]) -> None:
        """Compare further runs with this prediction."""
        self._levels = [*levels.forward, levels.head]
        self._kept = [option is Option.KEEP for option in choices]

    def reaches(self, position: int, in_use_bytes: int) -> None:
        """The forward of the run at this position begins; after the last run, that of the head."""
        now, before = in_use_bytes + self.came_free, position - 1
        if self._last is not None and self._last[0] == before and self._kept[before]:
            expected = self._levels[position] - self._levels[before]
            self._shortfalls[before] = max(0, expected - (now - self._last[1]))
        self._last = position, now

    def less_in_forward(self, position: int) -> int:
        """The bytes by which the forward of a run is expected to rise less than predicted."""
        slope = sum(self._proportions.forward[position : position + 1])
        return round(slope * self._shortfalls.get(position - 1, 0))

    def less_in_backward(self, position: int, *, evicted: bool) -> int:
        """The bytes by which the backward of a run is expected to rise less than predicted."""
        slopes = self._proportions.recompute if evicted else self._proportions.backward
        return round(sum(slopes[position : position + 1]) * self._shortfalls.get(position, 0))


class StepEvictor(Listener):
    """Evicts kept activations of one step.

    The collector calls `look`. If the step is not measured, the evictor listens to blocks itself.
    """

    measures = False

    def __init__(
        self,
        meter: Meter,
        base_bytes: int,
        available_bytes: int,
        proportions: Proportions,
        collector: Collector | None,
    ) -> None:
        self._meter = meter
        self._base = base_bytes
        self._available = available_bytes
        self._collector = collector
        if collector is not None:
            collector.look = self.look
        self._runs: list[Run] = []
        self._growth = _Growth(proportions)
        self._held: list[_Held] = []
        self._profile: Profile | None = None
        self._choices: dict[Run, Option] = {}
        self._unseen: Collection[Run] = ()
        self.evicted: set[Run] = set()

    def follow(
        self, profile: Profile | None, choices: Mapping[Run, Option], unseen: Collection[Run] = ()
    ) -> None:
        """Use these costs and choices from now on; runs that were evicted count as recomputed.

        When the backward reaches the `unseen` runs, memory is not read.
        """
        self._profile, self._choices, self._unseen = profile, dict(choices), unseen
        self._choices.update(dict.fromkeys(self.evicted & choices.keys(), Option.RECOMPUTE))
        self._planned = list(choices)
        self._positions = {run: k for k, run in enumerate(choices)}
        self._expect()
        if profile is not None:
            self._growth.expect(self._levels, self._choices.values())

    def _expect(self) -> None:
        if self._profile is not None:
            costs = costs_of(self._profile, list(self._choices.values()))
            moments = Moments(self._profile, costs)
            self._levels = moments.levels()
            self._rises = moments.rises(self._levels)

    def _position(self, run: int) -> int | None:
        """The position in the plan of the run with this number; None if it is not in the plan."""
        return self._positions.get(self._runs[run])

    def run_begins(self, run: Run) -> int:
        """A block's forward is about to start. Returns the number of this run."""
        self._runs.append(run)
        number = len(self._runs) - 1
        if self._collector is None:
            self._look_now("forward", number)
        return number

    def before_head(self) -> None:
        """The last run in the plan has returned."""
        if self._collector is None:
            self._look_now("head", -1)

    def before_use(self, run: int) -> None:
        self._look_now("backward", run)

    def before_recompute(self, run: int) -> None:
        self._look_now("backward", run)

    def _look_now(self, where: str, run: int) -> None:
        if self._held:
            self.look(where, run, self._meter.read().in_use)

    def hold(self, run: int, frame: Frame) -> None:
        at = self._position(run)
        cost = None if self._profile is None or at is None else self._profile.runs[at]
        nanoseconds_per_byte = cost.nanoseconds / max(1, cost.held) if cost is not None else 0.0
        self._held.append(_Held(run, weakref.ref(frame), nanoseconds_per_byte))

    def look(self, where: str, run: int, in_use_bytes: int) -> bool:
        """Evict if the rise until the next look would not fit; whether anything was evicted."""
        if self._profile is None or not self._held:
            return False
        if where == "head":
            last = len(self._planned)
            self._growth.reaches(last, in_use_bytes)
            rise = max(self._rises.head, self._rise_of_unseen(last, self._levels.head))
        else:
            at = self._position(run)
            if at is None:
                return False
            if where == "forward":
                self._growth.reaches(at, in_use_bytes)
                rise = self._rises.forward[at] - self._growth.less_in_forward(at)
            else:
                following = self._rise_of_unseen(at, self._levels.backward[at])
                rise = max(self._rise_in_backward(at, self._runs[run]), following)
        short = in_use_bytes + rise - self._base - self._available
        return short > 0 and self._evict(short) > 0

    def _rise_in_backward(self, position: int, run: Run) -> int:
        """By how much the backward of a run is expected to rise."""
        less = self._growth.less_in_backward(position, evicted=run in self.evicted)
        return self._rises.backward[position] - less

    def _rise_of_unseen(self, position: int, level: int) -> int:
        """By how much the backwards that follow are expected to rise above a level, until memory is
        read again."""
        rise = 0
        for at in reversed(range(position)):
            run = self._planned[at]
            if run not in self._unseen:
                break
            rise = max(rise, self._levels.backward[at] - level + self._rise_in_backward(at, run))
        return rise

    def make_room(self) -> bool:
        """Memory ran out: evict everything that can be evicted; whether that freed memory."""
        return self._evict(None) > 0

    def _evict(self, wanted_bytes: int | None) -> int:
        """Evict until `wanted_bytes` are freed, or everything if None. Returns the freed bytes."""
        freed = 0
        for held in sorted(self._held, key=lambda held: (held.nanoseconds_per_byte, held.run)):
            if wanted_bytes is not None and freed >= wanted_bytes:
                break
            frame = held.frame()
            if frame is None or not frame.can_be_evicted:
                continue
            before = self._meter.read().in_use
            frame.evict()
            came_free = before - self._meter.read().in_use
            freed += came_free
            self._growth.came_free += came_free
            self._note_evicted(held.run, came_free)
        self._held = [held for held in self._held if held.can_be_evicted]
        self._expect()
        return freed

    def _note_evicted(self, run: int, freed_bytes: int) -> None:
        key = self._runs[run]
        self.evicted.add(key)
        if key in self._choices:
            self._choices[key] = Option.RECOMPUTE
        if self._collector is not None:
            self._collector.evicted(run, freed_bytes)
