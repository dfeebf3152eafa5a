"""Evict instead of fail: drop kept activations when a step takes more memory than predicted.

In steps whose prediction is not trusted, kept blocks hold their activations in frames of ours.
Before each block's forward, before the head, and when the backward comes to each block, memory in
use is compared with the timeline. If it is so far ahead that the rest of the step would not fit,
kept activations are dropped, those first that cost the least time for each byte that comes free;
their blocks are recomputed in the backward. The idea is DTR's, at the level of blocks, and as a net
under the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from mimose.costs import Option, Profile, Run, levels, peaks_to_come
from mimose.execution import Frame
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


class StepEvictor:
    """Evicts kept activations of one step."""

    def __init__(
        self,
        meter: Meter,
        base_bytes: int,
        available_bytes: int,
        collector: Collector,
    ) -> None:
        self._meter = meter
        self._base = base_bytes
        self._available = available_bytes
        self._collector = collector
        self._held: list[_Held] = []
        self._profile: Profile | None = None
        self._choices: dict[Run, Option] = {}
        self.evicted: set[Run] = set()

    def follow(self, profile: Profile | None, choices: Mapping[Run, Option]) -> None:
        """The step runs under this plan from now on."""
        self._profile, self._choices = profile, dict(choices)
        self._choices.update(dict.fromkeys(self.evicted & choices.keys(), Option.RECOMPUTE))
        self._positions = {run: k for k, run in enumerate(choices)}
        self._expect()

    def _expect(self) -> None:
        if self._profile is not None:
            choices = list(self._choices.values())
            forward, self._level_at_head, backward = levels(self._profile, choices)
            rest, self._peak_from_head, last = peaks_to_come(self._profile, choices)
            self._of_runs = (forward, rest), (backward, last)

    def _position(self, run: int) -> int | None:
        """Where in the plan the run of this number is."""
        return self._positions.get(self._collector.run_of(run))

    def hold(self, run: int, frame: Frame) -> None:
        at = self._position(run)
        cost = None if self._profile is None or at is None else self._profile.runs[at]
        price = cost.nanoseconds / max(1, cost.held) if cost is not None else 0.0
        self._held.append(_Held(run, weakref.ref(frame), price))

    def look(self, where: str, run: int, in_use_bytes: int) -> bool:
        """Compare memory in use with the timeline; evict if the rest of the step would not fit.

        Returns whether anything was evicted.
        """
        if self._profile is None or not self._held:
            return False
        if where == "head":
            level, to_come = self._level_at_head, self._peak_from_head
        else:
            at, phase = self._position(run), 0 if where == "forward" else -1
            if at is None:
                return False
            level, to_come = self._of_runs[phase][0][at], self._of_runs[phase][1][at]
        ahead = in_use_bytes - self._base - level
        short = to_come + ahead - self._available
        return ahead > 0 and short > 0 and self._evict(short) > 0

    def make_room(self) -> bool:
        """Memory ran out: evict everything that can be."""
        return self._evict(None) > 0

    def _evict(self, wanted_bytes: int | None) -> int:
        """Evict until so many bytes came free, or everything; how many did."""
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
            self._note_evicted(held.run, came_free)
        self._held = [held for held in self._held if held.can_be_evicted]
        self._expect()
        return freed

    def _note_evicted(self, run: int, freed_bytes: int) -> None:
        key = self._collector.run_of(run)
        self.evicted.add(key)
        if key in self._choices:
            self._choices[key] = Option.RECOMPUTE
        self._collector.evicted(run, freed_bytes)
