"""What the benchmark's tests share: small conditions, a surveyed task, a way to run one."""

from __future__ import annotations

from loops import once
from mimose.bench.arena import Arena, Conditions
from mimose.bench.budgets import Asked, Limit, limits
from mimose.bench.contestant import Match
from mimose.bench.harness import Run, run
from mimose.bench.lineup import contestant_named
from mimose.bench.survey import Survey, survey
from mimose.bench.workloads import TASKS

STEPS = 10


@once
def arena(task: str, steps: int = STEPS) -> Arena:
    return Arena(TASKS[task], Conditions(device="cpu", steps=steps, small=True))


@once
def surveyed(task: str) -> Survey:
    return survey(arena(task))


def limits_of(task: str, asked: Asked) -> list[Limit]:
    its_arena = arena(task)
    return limits(surveyed(task), [its_arena.size_of(s) for s in its_arena.shapes], asked)


def half_tight(task: str) -> int:
    """The budget that plain training exceeds on half of the steps."""
    (limit,) = limits_of(task, Asked(tight=(50,)))
    return limit.total_bytes


@once
def trained(contestant: str, task: str = "QA-Bert", steps: int = STEPS) -> Run:
    match = Match(arena(task, steps), surveyed(task), half_tight(task))
    return run(contestant_named(contestant), match)
