"""Planners: from a profile and the bytes available to a plan."""

from __future__ import annotations

from mimose.errors import ArgumentError
from mimose.planning.planners.base import Planner
from mimose.planning.planners.greedy import Greedy
from mimose.planning.planners.greedy_literal import GreedyLiteral
from mimose.planning.planners.guarded import Guarded
from mimose.planning.planners.optimal import Optimal
from mimose.planning.planners.static import Static
from mimose.planning.planners.strictest import strictest
from mimose.planning.planners.trivial import KeepAll, RecomputeAll

__all__ = [
    "PLANNER_NAMES",
    "Greedy",
    "GreedyLiteral",
    "Guarded",
    "KeepAll",
    "Optimal",
    "Planner",
    "RecomputeAll",
    "Static",
    "planner_named",
    "strictest",
]

_BY_NAME: dict[str, type[Planner]] = {
    "optimal": Optimal,
    "greedy": Greedy,
    "greedy_literal": GreedyLiteral,
    "static": Static,
    "keep_all": KeepAll,
    "recompute_all": RecomputeAll,
}
PLANNER_NAMES = tuple(_BY_NAME)
"""What `planner=` accepts as a name."""


def planner_named(planner: str | Planner) -> Planner:
    """The planner of this name, or the planner itself."""
    if isinstance(planner, str):
        if planner in _BY_NAME:
            return _BY_NAME[planner]()
    elif isinstance(planner, type):
        raise ArgumentError(
            f"planner={planner.__name__} is a class: give an instance, planner={planner.__name__}()"
        )
    elif callable(getattr(planner, "plan", None)):
        return planner
    raise ArgumentError(
        f"planner={planner!r} is none of {', '.join(map(repr, _BY_NAME))}, nor an object with "
        "plan(profile, available_bytes) -> Plan"
    )
