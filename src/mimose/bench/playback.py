"""Plans known in advance, played back: no observing, no planning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from mimose.costs import Option, Pattern, Run
from mimose.interception import KEEP, RECOMPUTE, Directive

Plans = Mapping[Run, Option]
"""The option of each run of a step."""


@final
class Playback:
    """Directs blocks by the plan that `begin` was given."""

    def __init__(self) -> None:
        self._plan: Plans = {}
        self._calls: dict[int, int] = {}

    def begin(self, plan: Plans) -> None:
        """A step under this plan is about to start."""
        self._plan = plan
        self._calls.clear()

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        """As planned; runs that the plan does not know are recomputed."""
        call = self._calls.get(block, 0)
        self._calls[block] = call + 1
        return KEEP if self._plan.get((block, call)) is Option.KEEP else RECOMPUTE

    def ran_out(self, block: int) -> None:
        raise AssertionError("no block is guarded here: running out of memory is the step's end")

    @property
    def recomputed(self) -> int:
        """How many runs the plan recomputes."""
        return sum(option.recomputes for option in self._plan.values())


def everything(pattern: Pattern) -> Plans:
    """Every run recomputed."""
    return dict.fromkeys(pattern, Option.RECOMPUTE)


def only(block: int, pattern: Pattern) -> Plans:
    """One block recomputed, all others kept."""
    return {run: Option.of(run[0] == block) for run in pattern}
