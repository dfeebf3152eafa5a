"""DTR at the level of blocks: no plan and no estimator, eviction when memory runs short.

DTR (Kirisame et al., 2021) looks at every allocation, and evicts tensors when one would not fit.
Here blocks are what is evicted. Memory is compared with the budget before each block's forward,
before the head, and when the backward comes to each block. Room is made for what the block before
has needed, or the head in the step before. If that was too little and a forward or a recompute runs
out of memory, more is evicted and it runs again.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any, final

from mimose.bench.arena import Trainee
from mimose.bench.batches import BatchShape
from mimose.bench.contestant import Contestant, Match, StepNote
from mimose.costs import Option
from mimose.execution import Frame, Listener
from mimose.interception import RECOMPUTE, Attachment, Directive, find_blocks
from mimose.memory import Clock, Meter, meter_for


@dataclass(slots=True)
class _Run:
    """One call of a block that has kept its activations."""

    frame: weakref.ref[Frame] | None = None
    begun: Any = None
    ended: Any = None
    used_at: float = 0.0
    bytes: int = 0

    def h(self, clock: Clock, now: float) -> float:
        """DTR's score: time to rebuild, over bytes and staleness. The least is evicted first.

        A block's own input stays, so no other evicted block has to be rebuilt for it. While the
        device has not got far enough to tell the time, all blocks count as equally fast.
        """
        seconds = clock.seconds(self.begun, self.ended)
        return (seconds or 1e-3) / max(1, self.bytes) / max(1e-9, now - self.used_at)

    @property
    def can_be_evicted(self) -> bool:
        frame = None if self.frame is None else self.frame()
        return frame is not None and frame.can_be_evicted


@final
class BlockEviction(Listener):
    """Keeps every block, and evicts those with the least h when memory runs short."""

    def __init__(self, meter: Meter, clock: Clock, budget_bytes: int) -> None:
        self._meter, self._clock, self._budget_bytes = meter, clock, budget_bytes
        self.active = False
        """Whether it decides yet; until then every block is recomputed, and tried with that."""
        self._runs: list[_Run] = []
        self._rise = self._head_rise = 0
        """What the last stretch between two looks at memory has needed at its highest; and what
        the last head has."""
        self._start_bytes = self._expected = 0
        self._in_head = False
        self.recomputed = 0
        self.evictions = 0
        self.deciding_seconds = 0.0
        self._evicted: list[tuple[Any, Any]] = []
        """When the forward of each evicted run began and ended, as marks of the clock."""

    @property
    def recompute_seconds(self) -> float:
        """What the forwards of evicted runs took: so much is computed again. Wait for the device
        first."""
        known = (self._clock.seconds(begun, ended) for begun, ended in self._evicted)
        return sum(seconds or 0.0 for seconds in known)

    def step_begins(self) -> None:
        """Of the last step only counts how many runs it had, and what the last block needed."""
        self._expected = len(self._runs)
        self._runs, self.recomputed, self._in_head = [], 0, False
        self._start_bytes = self._meter.read().in_use
        self._meter.reset_peak()

    # As a director

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        if not self.active:
            return RECOMPUTE
        self._look()
        self._runs.append(_Run(begun=self._clock.mark()))
        number = len(self._runs) - 1
        after = self._before_head if number + 1 == self._expected else None
        return Directive(Option.KEEP, number, self, self, guarded=True, after=after)

    def _before_head(self, _: Any, __: Any) -> None:
        self._look(self._head_rise)
        self._in_head = True

    def ran_out(self, block: int) -> None:
        self.recomputed += 1

    # As an evictor

    def hold(self, run: int, frame: Frame) -> None:
        held = self._runs[run]
        held.ended, held.used_at = self._clock.mark(), time.perf_counter()
        held.frame = weakref.ref(frame)
        held.bytes = max(0, self._meter.read().in_use - self._start_bytes)

    def make_room(self) -> bool:
        """Memory ran out: make twice the room that was thought to be enough."""
        return self._evict(max(2 * self._rise, 1)) > 0

    # As a listener

    def before_use(self, run: int) -> None:
        self._look()

    def before_recompute(self, run: int) -> None:
        self._look()

    def _look(self, room_bytes: int | None = None) -> None:
        """Make so much room, or as much as the last stretch has needed."""
        reading = self._meter.read()
        rise = max(reading.peak - self._start_bytes, 0)
        if self._in_head:
            self._head_rise, self._in_head = rise, False
        else:
            self._rise = rise
        room = self._rise if room_bytes is None else room_bytes
        short = reading.in_use + room - self._budget_bytes
        if short > 0:
            self._evict(short)
            reading = self._meter.read()
        self._start_bytes = reading.in_use
        self._meter.reset_peak()

    def _evict(self, wanted_bytes: int) -> int:
        """Evict the block with the least h until so much came free; how much did."""
        began, freed = time.perf_counter(), 0
        while freed < wanted_bytes:
            now = time.perf_counter()
            candidates = [run for run in self._runs if run.can_be_evicted]
            if not candidates:
                break
            run = min(candidates, key=lambda run: run.h(self._clock, now))
            freed += self._drop(run)
        self.deciding_seconds += time.perf_counter() - began
        return freed

    def _drop(self, run: _Run) -> int:
        before = self._meter.read().in_use
        frame = None if run.frame is None else run.frame()
        if frame is not None:
            frame.evict()
        self.evictions += 1
        self.recomputed += 1
        self._evicted.append((run.begun, run.ended))
        return before - self._meter.read().in_use


class Dtr(Contestant):
    """DTR at the level of blocks, on mimose's own recompute."""

    name = "dtr"

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        self._attachment: Attachment | None = None

    def attach(self, trainee: Trainee) -> None:
        assert self.match.budget_bytes is not None
        arena = self.match.arena
        self._meter = meter_for(arena.device)  # with peaks of its own
        self._eviction = BlockEviction(self._meter, arena.clock, self.match.budget_bytes)
        self._attachment = Attachment(trainee.model, find_blocks(trainee.model), self._eviction)
        trainee.warm_up(min(arena.shapes))  # blocks are tried, as for those who know their plans
        self._eviction.active = True

    def step_begins(self, shape: BatchShape) -> None:
        self._eviction.step_begins()

    def step_over(self) -> StepNote:
        return StepNote(recomputed=self._eviction.recomputed)

    def detach(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
            self._meter.close()

    def spent(self) -> dict[str, Any]:
        return {
            "evictions": self._eviction.evictions,
            "deciding_seconds": self._eviction.deciding_seconds,
            "recompute_seconds": self._eviction.recompute_seconds,
        }


@final
class DtrUncapped(Dtr):
    """The same without the allocator's hard limit, as its authors ran it.

    It evicts by what is in use. What the allocator holds beyond that may exceed the budget.
    """

    name = "dtr-uncapped"
    capped = False
