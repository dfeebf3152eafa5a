"""Hold a step to its timeline while its blocks run.

Memory that depends on more than the size (a detector's proposals, an expert's share of tokens) or a
size beyond those seen cannot be foreseen, but it can be noticed: before a block runs, the memory in
use tells what earlier blocks have taken, and the block's arguments tell whether it is larger than
its kind. If either is ahead of the timeline, the blocks still to come are planned again.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from mimose.costs import Profile, RunCost, levels
from mimose.memory import Meter
from mimose.planning import Optimal, Plan
from mimose.tensors import bytes_given

_TOLERANCE = 0.005
"""How far memory may be ahead, as a share of what is available, before anything is done."""
_LARGER = 1.02
"""By how much a run's arguments may exceed what was predicted."""


class Watch:
    """Compares a step with its timeline at the runs named; gives a stricter plan where needed."""

    def __init__(
        self,
        meter: Meter,
        base_bytes: int,
        profile: Profile,
        plan: Plan,
        available_bytes: int,
        at: Container[int],
    ) -> None:
        self._meter = meter
        self._base = base_bytes
        self._profile = profile
        self._available = available_bytes
        self._choices = plan.recompute
        self._levels = levels(profile, plan.recompute)
        self._at = at
        self._ahead = 0
        self._scale = 1.0
        self.difference = 0.0
        """The largest difference from the timeline, as a share of what was to be in use."""

    def of_plan(self, profile: Profile, plan: Plan) -> Watch:
        """The same watch over a step that has become known to be another one."""
        watch = Watch(self._meter, self._base, profile, plan, self._available, self._at)
        watch.difference = self.difference
        return watch

    def before_run(self, position: int, args: Any, kwargs: Any) -> tuple[bool, ...] | None:
        """The run at `position` is about to start: all choices anew, if it must be stricter."""
        if position not in self._at:
            return None
        level = self._meter.read().in_use - self._base
        ahead = level - self._levels[position]
        self._note(ahead, position)
        expected = self._profile.runs[position].input
        larger = bytes_given(args, kwargs) / expected if expected else 1.0
        more = ahead - self._ahead > _TOLERANCE * self._available
        if not more and larger <= self._scale * _LARGER:
            return None
        self._ahead, self._scale = max(self._ahead, ahead), max(self._scale, larger)
        return self._stricter(position, level)

    def _note(self, ahead: int, position: int) -> None:
        share = ahead / max(1, self._levels[position], self._available // 10)
        if abs(share) > abs(self.difference):
            self.difference = share

    def _stricter(self, position: int, level: int) -> tuple[bool, ...] | None:
        """What is left, planned anew from the memory in use now; nothing gets laxer."""
        runs = self._profile.runs[position:]
        kept = max(0, level - runs[0].start)
        rest = Profile(
            self._profile.size,
            tuple(_scaled(run, self._scale) for run in runs),
            self._profile.head_forward,
            self._profile.head_backward,
        )
        again = Optimal().plan(rest, self._available - kept).recompute
        former = self._choices[position:]
        stricter = tuple(a or b for a, b in zip(former, again, strict=True))
        if stricter == former:
            return None
        self._choices = (*self._choices[:position], *stricter)
        self._levels = levels(self._profile, self._choices)
        return self._choices


def _scaled(run: RunCost, scale: float) -> RunCost:
    if scale == 1.0:
        return run
    return run._replace(
        forward=run.start + int((run.forward - run.start) * scale),
        saved=int(run.saved * scale),
        spike=int(run.spike * scale),
        back=int(run.back * scale),
        out_saved=int(run.out_saved * scale),
        in_idle=int(run.in_idle * scale),
    )
