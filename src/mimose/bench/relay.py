"""Contestants take turns, some steps at a time, each in a process of its own.

The pace of a machine drifts by the second, above all of one that is shared. Whole runs, one after
another, meet different paces; so those that are compared train side by side, and only one of them
at a time: the baton goes round. Each has its own allocator, with its own hard limit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mimose.bench.arena import Arena, Conditions
from mimose.bench.circumstances import settle_device
from mimose.bench.contestant import Match
from mimose.bench.harness import Run, run
from mimose.bench.lineup import contestant_named
from mimose.bench.survey import Survey
from mimose.bench.workloads import task_named


@dataclass(frozen=True, slots=True)
class Entry:
    """Who runs, under which budget."""

    contestant: str
    budget_bytes: int | None


def run_together(
    entries: Sequence[Entry], task: str, conditions: Conditions, survey: Survey
) -> list[Run]:
    """The runs of these, who take turns of `conditions.leg` steps; in the order of the entries."""
    runners = [_Runner(entry, task, conditions, survey.to_plain()) for entry in entries]
    try:
        for runner in runners:
            runner.wait()  # until its model is there
        lap = 0
        while any(runner.outcome is None for runner in runners):
            first = lap % len(runners)  # or one would always come after the same other
            for runner in (*runners[first:], *runners[:first]):
                if runner.outcome is None:
                    runner.go()
                    runner.wait()
            lap += 1
        return [runner.outcome for runner in runners if runner.outcome is not None]
    finally:
        for runner in runners:
            runner.stop()


class _Runner:
    """A contestant's process, as those who wait for it see it."""

    def __init__(
        self, entry: Entry, task: str, conditions: Conditions, survey: dict[str, Any]
    ) -> None:
        spawning = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(
            target=_compete, args=(theirs, entry, task, conditions, survey), daemon=True
        )
        self._process.start()
        theirs.close()
        self.outcome: Run | None = None

    def go(self) -> None:
        with contextlib.suppress(OSError):  # if it is gone, waiting for it will tell
            self._pipe.send("go")

    def wait(self) -> None:
        """Until it has given the baton back, or is done."""
        try:
            self.outcome = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.outcome = Run(missing=f"its process ended with code {self._process.exitcode}")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class _Baton:
    """The contestant's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def pass_on(self) -> None:
        self._pipe.send(None)
        self._pipe.recv()


def _compete(
    pipe: Connection, entry: Entry, task: str, conditions: Conditions, survey: dict[str, Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for it stops it
    settle_device(conditions.device)
    arena = Arena(task_named(task), conditions)
    match = Match(arena, Survey.from_plain(survey), entry.budget_bytes)
    pipe.send(run(contestant_named(entry.contestant), match, _Baton(pipe)))
