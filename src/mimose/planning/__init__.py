"""From a profile and a number of bytes to a plan: the paper's scheduler.

Plans, the plan cache, and planners (one file for each idea). Knows neither torch nor where profiles
come from.
"""

from mimose.planning.plan import NO_PLAN, Plan
from mimose.planning.plan_cache import CachedPlan, PlanCache
from mimose.planning.planners import (
    PLANNER_NAMES,
    Greedy,
    GreedyLiteral,
    Guarded,
    KeepAll,
    Optimal,
    Planner,
    RecomputeAll,
    Static,
    planner_named,
    strictest,
)

__all__ = [
    "NO_PLAN",
    "PLANNER_NAMES",
    "CachedPlan",
    "Greedy",
    "GreedyLiteral",
    "Guarded",
    "KeepAll",
    "Optimal",
    "Plan",
    "PlanCache",
    "Planner",
    "RecomputeAll",
    "Static",
    "planner_named",
    "strictest",
]
