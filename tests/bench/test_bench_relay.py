"""Contestants that take turns, each in its own process, do what they do alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_parts import arena, half_tight, surveyed, trained

from loops import once
from mimose.bench.arena import Arena
from mimose.bench.budgets import Asked, Limit
from mimose.bench.contestant import Match
from mimose.bench.harness import Run, run
from mimose.bench.lineup import contestant_named
from mimose.bench.progress import Deadline
from mimose.bench.records import ResultsFile
from mimose.bench.relay import Entry, run_together
from mimose.bench.schedule import Program, Schedule, Turn
from mimose.bench.workloads import TASKS

CONDITIONS = replace(arena("QA-Bert").conditions, leg=4)


@once
def together() -> dict[str, Run]:
    """Runs of four processes: one that dies, one that says it cannot run, and two that train."""
    names = ("nobody", "static", "compile-budget", "mimose")
    entries = [Entry(name, half_tight("QA-Bert")) for name in names]
    outcomes = run_together(entries, "QA-Bert", CONDITIONS, surveyed("QA-Bert"))
    return dict(zip(names, outcomes, strict=True))


def test_runs_side_by_side_are_those_that_each_would_make_alone() -> None:
    runs = together()
    static = runs["static"]
    assert "dispatch mode" in (runs["compile-budget"].missing or "")
    for name in ("static", "mimose"):
        outcome = runs[name]
        assert outcome.steps.loss == trained(name).steps.loss
        assert outcome.seconds * 1e3 >= sum(outcome.steps.milliseconds)
    assert static.steps.recomputed == trained("static").steps.recomputed
    # This process holds more than theirs, so peaks differ by what else lives in it.
    rises, alone = (
        [peak - run.steps.peak_bytes[0] for peak in run.steps.peak_bytes]
        for run in (static, trained("static"))
    )
    assert rises == pytest.approx(alone, rel=0.05, abs=10_000)


def test_the_baton_is_passed_on_before_the_first_step_and_after_each_leg() -> None:
    class Counting:
        passes = 0

        def pass_on(self) -> None:
            self.passes += 1

    baton, its_arena = Counting(), Arena(TASKS["QA-Bert"], CONDITIONS)
    match = Match(its_arena, surveyed("QA-Bert"), half_tight("QA-Bert"))
    outcome = run(contestant_named("static"), match, baton)
    assert len(outcome.steps.loss) == 10
    assert baton.passes == 3


def test_a_process_that_dies_does_not_stop_the_others() -> None:
    assert together()["nobody"].missing == "its process ended with code 1"
    for name in ("static", "mimose"):
        assert together()[name].missing is None
        assert len(together()[name].steps.loss) == len(arena("QA-Bert").shapes)


def heats(
    tmp_path: Path, budgets: tuple[int, ...], device_bytes: int, rounds: int = 1
) -> list[list[str]]:
    """Heats of everybody's turns, where the device has so much."""

    class Roomy(Arena):
        @property
        def device_bytes(self) -> int:
            return device_bytes

    names = ("plain", "torch-all", "static", "mimose")
    program = Program(
        tasks=(TASKS["QA-Bert"],),
        contestants=tuple(map(contestant_named, names)),
        asked=Asked(tight=(50,)),
        rounds=rounds,
        conditions=CONDITIONS,
    )
    file = ResultsFile.opened(tmp_path / "r.jsonl", {"conditions": CONDITIONS.to_plain()})
    file.add_survey(surveyed("QA-Bert"))
    schedule = Schedule(program, file, Deadline(None))
    turns = list(schedule.turns([Limit(str(number), number) for number in budgets]))
    found = schedule.heats(Roomy(TASKS["QA-Bert"], CONDITIONS), turns)
    return [[_name(turn) for turn in heat] for heat in found]


def _name(turn: Turn) -> str:
    return f"{turn.kind.name} {turn.limit.label if turn.limit else '-'}"


def test_all_runs_of_a_round_are_made_side_by_side_by_budget(tmp_path: Path) -> None:
    assert heats(tmp_path, (300, 100), 1 << 60) == [
        [
            *("plain -", "torch-all 100", "static 100", "mimose 100"),
            *("static 300", "mimose 300"),
        ],
    ]


def test_no_more_run_side_by_side_than_the_device_has_room_for(tmp_path: Path) -> None:
    assert heats(tmp_path, (100,), 3 << 30) == [
        ["plain -", "torch-all 100"],
        ["static 100", "mimose 100"],
    ]
    assert heats(tmp_path, (100,), 1) == [
        ["plain -"],
        ["torch-all 100"],
        ["static 100"],
        ["mimose 100"],
    ]


def test_a_round_is_over_before_the_next_begins(tmp_path: Path) -> None:
    assert [len(heat) for heat in heats(tmp_path, (100,), 1 << 60, rounds=2)] == [4, 4]
