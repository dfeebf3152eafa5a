"""Plans known in advance, played back: no observing, no planning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from mimose.costs import Pattern, Run
from mimose.interception import BlockInterceptor

Plans = Mapping[Run, bool]
"""For each run of a step, whether it is recomputed."""


@final
class Playback:
    """Directs blocks by the plan that `begin` was given."""

    def __init__(self) -> None:
        self._plan: Plans = {}
        self._counts: dict[int, int] = {}

    def begin(self, plan: Plans) -> None:
        """A step under this plan is about to start."""
        self._plan = plan
        self._counts.clear()

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        nth = self._counts.get(interceptor.index, 0)
        self._counts[interceptor.index] = nth + 1
        return self._plan.get((interceptor.index, nth), True)

    def ran_out(self, interceptor: BlockInterceptor) -> None:
        raise AssertionError("no block is guarded here: running out of memory is the step's end")

    @property
    def recomputed(self) -> int:
        """How many runs the plan recomputes."""
        return sum(self._plan.values())


def everything(pattern: Pattern) -> Plans:
    """Every run recomputed."""
    return dict.fromkeys(pattern, True)


def only(block: int, pattern: Pattern) -> Plans:
    """One block recomputed, all others kept."""
    return {run: run[0] == block for run in pattern}
