"""How far the benchmark is and how long it will take, on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Counts runs; guesses the time left from runs of the same kind.

    A bar where rich is installed and somebody is looking; plain lines otherwise.
    """

    def __init__(self, runs: int) -> None:
        self._total, self._done = runs, 0
        self._times: dict[str, list[float]] = {}
        self._left: dict[str, int] = {}
        self._bar = _bar(runs)

    def expect(self, task: str, runs: int, done: int = 0) -> None:
        """So many runs of a task are still to come, so many were done before."""
        self._left[task] = runs
        self._done += done

    def say(self, line: str) -> None:
        """Something worth a line."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def seconds_of(self, task: str) -> float:
        """How long a run of this task takes; of any task, if it has not run yet."""
        known = self._times.get(task) or [t for times in self._times.values() for t in times]
        return sum(known) / len(known) if known else 0.0

    def done(self, task: str, seconds: float, line: str) -> None:
        """A run is over."""
        self._done += 1
        self._times.setdefault(task, []).append(seconds)
        self._left[task] = max(0, self._left.get(task, 1) - 1)
        left = sum(self.seconds_of(name) * runs for name, runs in self._left.items())
        self.say(f"[{self._done}/{self._total}] {line}; about {_text(left)} left")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Deadline:
    """A time limit that is looked at between runs."""

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    def allows(self, seconds: float) -> bool:
        """Whether something that takes this long would still be done in time."""
        return self._until is None or time.monotonic() + seconds <= self._until


def _bar(total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    bar = Bar(TextColumn("runs"), BarColumn(), MofNCompleteColumn(), console=Console(stderr=True))
    bar.add_task("runs", total=total)
    bar.start()
    return bar


def _text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
