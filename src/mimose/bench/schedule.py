"""The whole benchmark: every task, budget, contestant and round, in turns.

In each round every contestant runs once over the same batches, in an order that rotates from round
to round, so that nobody profits from a warmer machine. With legs, those that are compared run side
by side instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from mimose.bench import estimators
from mimose.bench.arena import Arena, Conditions
from mimose.bench.budgets import Asked, Limit, floor_bytes, limits, too_small
from mimose.bench.contestant import Contestant, Match
from mimose.bench.harness import Run, run
from mimose.bench.progress import Deadline, Progress
from mimose.bench.records import UNKNOWN, Code, Record, ResultsFile
from mimose.bench.relay import Entry, run_together
from mimose.bench.survey import observe, survey
from mimose.bench.workloads import Task
from mimose.units import text_of

_ROOM = 0.85
"""The share of the device that runs side by side may take."""
_CONTEXT_BYTES = 1 << 30
"""What a process takes besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is to be measured."""

    tasks: tuple[Task, ...]
    contestants: tuple[type[Contestant], ...]
    asked: Asked
    rounds: int
    conditions: Conditions
    estimators: bool = True
    code: Code = UNKNOWN


@dataclass(frozen=True, slots=True)
class Turn:
    """One run to be made."""

    limit: Limit | None
    kind: type[Contestant]
    round: int


class Schedule:
    """Measures a program into a file, until it is done or time is up."""

    def __init__(self, program: Program, file: ResultsFile, deadline: Deadline) -> None:
        self._program, self._file, self._deadline = program, file, deadline
        rounds = program.rounds * len(program.tasks)
        budgets = sum(map(len, (program.asked.total, program.asked.between, program.asked.tight)))
        free = sum(not kind.budgeted for kind in program.contestants)
        runs = rounds * (free + budgets * (len(program.contestants) - free))
        self._progress = Progress(runs)
        for task in program.tasks:
            self._progress.expect(task.name, runs // len(program.tasks))

    def measure(self) -> bool:
        """Everything that the file does not hold yet; whether all is there in the end."""
        try:
            return all(self._measure(task) for task in self._program.tasks)
        finally:
            self._progress.close()

    def _measure(self, task: Task) -> bool:
        arena = Arena(task, self._program.conditions)
        if not self._surveyed(arena):
            return False
        found = self._limits(arena)
        turns = list(self.turns(found))
        known = self._file.results.records
        missing = [turn for turn in turns if self._key(task, turn) not in known]
        self._progress.expect(task.name, len(missing), done=len(turns) - len(missing))
        if not arena.conditions.leg:
            return all(self._take(arena, [turn]) for turn in missing)
        return all(self._take(arena, heat) for heat in self.heats(arena, missing))

    def turns(self, found: list[Limit]) -> Iterator[Turn]:
        """All runs of a task in their order."""
        lowest = min(found, key=lambda limit: limit.total_bytes)
        for number in range(self._program.rounds):
            turns = []
            for kind in self._program.contestants:
                if kind.budgeted:
                    turns += [Turn(limit, kind, number) for limit in found]
                else:
                    turns.append(Turn(lowest if kind.capped else None, kind, number))
            first = number * len(turns) // self._program.rounds
            yield from turns[first:] + turns[:first]

    def heats(self, arena: Arena, turns: list[Turn]) -> Iterator[list[Turn]]:
        """Runs of one round side by side, as many as the device has room for.

        By budget, since those of one budget are compared most; first who needs none.
        """
        survey, room = self._file.results.surveys[arena.task.name], _ROOM * arena.device_bytes
        heat: list[Turn] = []
        taken = 0
        for turn in sorted(turns, key=lambda turn: (turn.round, _budget(turn) or 0)):
            need = (_budget(turn) or survey.kept_bytes(survey.largest)) + _CONTEXT_BYTES
            if heat and (taken + need > room or turn.round != heat[0].round):
                yield heat
                heat, taken = [], 0
            heat, taken = [*heat, turn], taken + need
        if heat:
            yield heat

    def _surveyed(self, arena: Arena) -> bool:
        name, known = arena.task.name, self._file.results
        if name not in known.surveys:
            if not self._deadline.allows(self._progress.seconds_of(name)):
                return False
            self._progress.say(f"{name}: looking at sizes up to {arena.size_of(arena.largest)}")
            self._file.add_survey(survey(arena))
        if self._program.estimators and name not in known.estimators:
            # Small models show that it works: the sizes of their survey are enough.
            small, surveyed = arena.conditions.small, known.surveys[name]
            seen = surveyed.full_batches if small else observe(arena, estimators.SIZES)
            self._file.add_estimators(name, estimators.compare(seen))
        return True

    def _limits(self, arena: Arena) -> list[Limit]:
        known = self._file.results.surveys[arena.task.name]
        for text in too_small(known, self._program.asked):
            self._progress.say(
                f"{arena.task.name}: budget {text} is left out; the floor is "
                f"{text_of(floor_bytes(known))}"
            )
        sizes = [arena.size_of(shape) for shape in arena.shapes]
        found = limits(known, sizes, self._program.asked)
        for limit in found:
            if limit.at_floor:
                self._progress.say(
                    f"{arena.task.name}: {limit.label} would be below 1.05 times what recomputing "
                    f"everything needs; it is raised to {text_of(floor_bytes(known))}"
                )
        self._file.add_limits(arena.task.name, found)
        return found

    def _take(self, arena: Arena, turns: list[Turn]) -> bool:
        """Make these runs, one alone or several side by side; whether there was time."""
        name = arena.task.name
        if not self._deadline.allows(len(turns) * self._progress.seconds_of(name)):
            return False
        began = time.monotonic()
        outcomes = self._outcomes(arena, turns)
        seconds = (time.monotonic() - began) / len(turns)
        for turn, outcome in zip(turns, outcomes, strict=True):
            record = Record(
                task=name,
                budget_bytes=_budget(turn),
                contestant=turn.kind.name,
                round=turn.round,
                run=outcome,
                code=self._program.code,
            )
            self._file.add(record)
            self._progress.done(name, seconds, _line(name, turn, outcome))
        return True

    def _outcomes(self, arena: Arena, turns: list[Turn]) -> list[Run]:
        survey = self._file.results.surveys[arena.task.name]
        entries = [Entry(turn.kind.name, _budget(turn)) for turn in turns]
        if arena.conditions.leg:
            return run_together(entries, arena.task.name, arena.conditions, survey)
        matches = (Match(arena, survey, entry.budget_bytes) for entry in entries)
        return [run(turn.kind, match) for turn, match in zip(turns, matches, strict=True)]

    @staticmethod
    def _key(task: Task, turn: Turn) -> tuple[str, int | None, str, int]:
        return task.name, _budget(turn), turn.kind.name, turn.round


def _budget(turn: Turn) -> int | None:
    return turn.limit.total_bytes if turn.limit else None


def _line(task: str, turn: Turn, outcome: Run) -> str:
    where = f"{task}, {turn.limit or 'no limit'}, {turn.kind.name}, round {turn.round + 1}"
    if outcome.missing:
        return f"{where}: does not run, {outcome.missing}"
    failed = f", {outcome.out_of_memory} out of memory" if outcome.out_of_memory else ""
    return f"{where}: {outcome.seconds:.2f} s{failed}"
