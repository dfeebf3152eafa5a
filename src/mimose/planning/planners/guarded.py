"""Guard training against errors of a user's own planner."""

from __future__ import annotations

import logging
import reprlib
from typing import final

from mimose.costs import Profile
from mimose.errors import warn
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner
from mimose.planning.planners.trivial import RecomputeAll

log = logging.getLogger("mimose")


@final
class Guarded(Planner):
    """Calls another planner. If that raises or returns no valid plan, every block is recomputed.

    Warns once. Training continues within the budget, but slower than necessary.
    """

    def __init__(self, inner: Planner) -> None:
        self.inner = inner
        self._warned = False

    @property
    def version(self) -> int:  # type: ignore[override]
        return getattr(self.inner, "version", 0)

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        try:
            plan = self.inner.plan(profile, available_bytes)
            problem = _problem(plan, len(profile.runs))
        except Exception as error:
            problem = f"raised {error!r}"
            log.debug("the planner's error", exc_info=True)
        if problem is None:
            return plan
        self._warn_once(problem)
        return RecomputeAll().plan(profile, available_bytes)

    def _warn_once(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"planner {type(self.inner).__name__} {problem}: every block is recomputed where "
                "that happens. Return Plan.of(profile, choices, available_bytes) with a choice "
                "for each of profile.runs"
            )


def _problem(plan: object, runs: int) -> str | None:
    if not isinstance(plan, Plan):
        return f"returned {reprlib.repr(plan)}, which is no Plan"
    if len(plan.choices) != runs:
        return f"returned a plan of {len(plan.choices)} choices for {runs} runs"
    return None
