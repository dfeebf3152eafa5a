"""Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019): rotor."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from mimose.comparison.evaluation import evaluate
from mimose.comparison.schedules import (
    Backward,
    Drop,
    Forward,
    Item,
    Operation,
    Recompute,
    Schedule,
    schedule_of,
)
from mimose.comparison.stages import Chain, Outcome, Stage, strictest
from mimose.costs import Option, Profile

SLOTS = 2000
"""Into so many slots the available bytes are divided. Sizes are rounded down; if the schedule then
takes too much, to the nearest slot; and at last up, where it never does. Rounding up loses at most
two slots a stage and two more, 4.9 % of the memory for 48 stages. All three take at most 0.4 s for
48 stages. Up to 2,000 bytes (in tests) the result is exact."""

Table: TypeAlias = NDArray[np.float64]


@final
class Rotor:
    """The least time over all nested recomputes, by dynamic programming.

    A stretch of the chain from stage s to stage t, whose input is there and whose output gradient
    will be, is processed in one of two ways within m bytes:

    - run stage s and save its activations, process s + 1 … t, run the backward of s; or
    - run s … i − 1 without saving, keep the input of i, process i … t, then free that input and
      process s … i − 1 again from the input of s.

    The least time of each stretch and each m follows from those of shorter ones. This is optimal
    among schedules that keep what they have stored until its backward.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots

    def schedule(self, profile: Profile, available_bytes: int) -> Outcome:
        """The least time for this many bytes above the step's start."""
        found = self.found(Chain.of(profile), available_bytes)
        fallback = schedule_of(profile, strictest(profile))
        return Outcome.of(profile, fallback if found is None else found, available_bytes)

    def found(self, chain: Chain, available_bytes: int) -> Schedule | None:
        """The schedule by the papers' model; None if nothing fits."""
        model = chain.as_profile()
        unit = max(1, -(-available_bytes // self._slots))
        everything = schedule_of(model, [Option.KEEP] * len(chain.stages))
        if evaluate(model, everything).peak_bytes <= available_bytes:
            return everything
        for rounding in sorted({0, unit // 2, unit - 1}):
            found = _found(chain, available_bytes, unit, rounding)
            if found and evaluate(model, found).peak_bytes <= available_bytes:
                return found
        return None


def _found(chain: Chain, available: int, unit: int, rounding: int) -> Schedule | None:
    """The schedule in slots of `unit` bytes; `rounding` is added before dividing."""
    stages = [_in_slots(stage, unit, rounding) for stage in (*chain.stages, _head(chain))]
    room = (available + unit - 1 - rounding) // unit - stages[0].input_bytes
    if room < 0:
        return None
    programme = _Programme(stages, room)
    if not np.isfinite(programme.least[0, -1, room]):
        return None
    return _Tracer(programme).schedule()


def _head(chain: Chain) -> Stage:
    """The head as a last stage."""
    return Stage(
        input_bytes=0,
        saved_bytes=0,
        forward_peak_bytes=chain.head_bytes,
        saving_peak_bytes=chain.head_bytes,
        gradient_bytes=0,
        backward_peak_bytes=0,
        nanoseconds=0,
        fixed=True,
    )


def _in_slots(stage: Stage, unit: int, rounding: int) -> Stage:
    sizes = {
        field.name: (getattr(stage, field.name) + rounding) // unit
        for field in fields(stage)
        if field.name.endswith("_bytes")
    }
    return replace(stage, **sizes)


class _Programme:
    """`least[s, t, m]`: the least time to process stages s … t in m slots beyond the input of s.

    All forwards count, the first ones included.
    """

    def __init__(self, stages: list[Stage], room: int) -> None:
        count = len(stages)
        self.stages = stages
        self.room = room
        self.least: Table = np.full((count, count, room + 1), np.inf)
        self._behind: Table = np.full((count, count, room + 1), np.inf)
        """`[t, s, m]`: the same if the input of s is to be stored in these m slots, too."""
        times = [stage.nanoseconds for stage in stages]
        self._times = np.concatenate([[0.0], np.cumsum(times)])
        for t in range(count):
            for s in reversed(range(t + 1)):
                self._fill(s, t)

    def _fill(self, s: int, t: int) -> None:
        best = self.least[s, t]
        need, rest = self.saving(s, t)
        if need <= self.room:
            best[need:] = rest[need:]
        options = self.splits(s, t, slice(None))
        if len(options):
            np.minimum(best, options.min(axis=0), out=best)
        shift = self.stages[s].input_bytes
        if shift <= self.room:
            self._behind[t, s, shift:] = best[: self.room + 1 - shift]

    def saving(self, s: int, t: int) -> tuple[int, Table]:
        """Saving the activations of s: the least slots for it, and the time by slots."""
        stage = self.stages[s]
        saved, gradient = stage.saved_bytes, self.stages[t].gradient_bytes
        need = max(
            gradient + stage.saving_peak_bytes,
            stage.gradient_bytes + saved + stage.backward_peak_bytes,
            saved,
        )
        if s == t:
            return need, np.full(self.room + 1, float(stage.nanoseconds))
        time = np.full(self.room + 1, np.inf)
        if saved <= self.room:
            time[saved:] = self._behind[t, s + 1, : self.room + 1 - saved] + stage.nanoseconds
        return need, time

    def splits(self, s: int, t: int, slots: slice) -> Table:
        """Storing the input of i for each i from s + 1 on: a row of times by slots for each."""
        needs = self._needs_of_splits(s, t)
        end = s + 1 + len(needs)
        rows = self._behind[t, s + 1 : end, slots] + self.least[s, s : end - 1, slots]
        rows += (self._times[s + 1 : end] - self._times[s])[:, None]
        first = slots.start or 0
        for row, need in zip(rows, needs, strict=True):
            row[: max(0, need - first)] = np.inf
        return rows

    def _needs_of_splits(self, s: int, t: int) -> list[int]:
        """The slots that the forwards of s … i − 1 need, for each i up to the first fixed one."""
        gradient, needs, highest = self.stages[t].gradient_bytes, [], 0
        for i in range(s, t):
            stage = self.stages[i]
            if stage.fixed:
                break
            own = stage.input_bytes if i > s else 0
            highest = max(highest, gradient + own + stage.forward_peak_bytes)
            needs.append(highest)
        return needs


class _Tracer:
    """Follows the choices that gave the least time, and writes the operations down."""

    def __init__(self, programme: _Programme) -> None:
        self._programme = programme
        self._stages = programme.stages
        self._forwards = 0
        """How many first forwards are written down."""
        self._operations: list[Operation] = []

    def schedule(self) -> Schedule:
        """The operations, without those of the head."""
        self._process(0, len(self._stages) - 1, self._programme.room)
        return tuple(self._operations)

    def _process(self, s: int, t: int, m: int) -> None:
        need, saving = self._programme.saving(s, t)
        splits = self._programme.splits(s, t, slice(m, m + 1))[:, 0]
        if need <= m and saving[m] <= splits.min(initial=np.inf):
            self._save(s, t, m)
            return
        i = s + 1 + int(splits.argmin())
        for k in range(s, i):
            self._run(k, keep=False)
            if k > s:
                self._operations.append(Drop(Item.INPUT, k))
        self._process(i, t, m - self._stages[i].input_bytes)
        self._process(s, i - 1, m)

    def _save(self, s: int, t: int, m: int) -> None:
        if s == len(self._stages) - 1:  # the head runs by itself
            return
        self._run(s, keep=True)
        if s < t:
            if not self._stages[s].fixed:  # what it does not save of its input is not needed
                self._operations.append(Drop(Item.INPUT, s))
            left = m - self._stages[s].saved_bytes - self._stages[s + 1].input_bytes
            self._process(s + 1, t, left)
        self._operations.append(Backward(s))

    def _run(self, k: int, *, keep: bool) -> None:
        if k == self._forwards:
            self._operations.append(Forward(k, keep))
            self._forwards += 1
        else:
            self._operations.append(Recompute(k, keep))
