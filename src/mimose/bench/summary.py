"""One table for who has a minute: time and peak of every contestant, by task and budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mimose.bench.analysis import Sheet
from mimose.bench.lineup import CONTESTANTS
from mimose.bench.markdown import limit_text, table
from mimose.units import GIB, MIB

HOW_TO_READ = """\
Seconds of whole runs, observing and planning included; medians over rounds, the lowest and highest
round in brackets. × plain: of the steps that both finished. Peak: the most that was in use in any
step. Peak / budget: the most that the allocator held, of contestants without a limit the most in
use. Out of memory: steps, in the worst round."""

_LABELS = 3
"""The first columns name a row; the others are numbers."""


def header(sheet: Sheet) -> list[str]:
    """The names of the columns, with the unit in which the peaks of these results are written."""
    return [
        *("task", "budget", "contestant", "seconds", "× plain", f"peak, {_unit(sheet)[1]}"),
        *("peak / budget", "out of memory"),
    ]


def _unit(sheet: Sheet) -> tuple[int, str]:
    """GiB, or MiB if no budget reaches one GiB."""
    budgets = (limit["total_bytes"] for task in sheet.tasks for limit in sheet.limits(task))
    return (GIB, "GiB") if max(budgets, default=GIB) >= GIB else (MIB, "MiB")


def rows(sheet: Sheet) -> Iterator[list[str]]:
    """A row for each contestant under each budget of each task."""
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            for name in sheet.contestants(task):
                if sheet.runs(task, limit["total_bytes"], name):
                    cells = _cells(sheet, task, limit["total_bytes"], name)
                    yield [task, limit_text(limit), name, *cells]


def _cells(sheet: Sheet, task: str, budget: int, name: str) -> Iterator[str]:
    seconds, over_plain = (
        sheet.seconds(task, budget, name),
        sheet.ratio(task, budget, name, "plain"),
    )
    steps = [run.steps for run in sheet.runs(task, budget, name).values()]
    peak = max(max(each.peak_bytes) for each in steps)
    held = max(max(each.held_bytes) for each in steps) if CONTESTANTS[name].capped else peak
    yield seconds.text() if seconds else "–"
    yield "1.00" if name == "plain" else over_plain.text() if over_plain else "–"
    yield f"{peak / _unit(sheet)[0]:.2f}"
    yield f"{held / budget:.3f}"
    yield str(sheet.out_of_memory(task, budget, name))


def as_markdown(sheet: Sheet) -> str:
    return table(header(sheet), list(rows(sheet)))


def as_text(sheet: Sheet) -> str:
    """For a terminal: aligned columns; what is the same as in the row above is left out."""
    found = list(rows(sheet))
    lines = [header(sheet), *_without_repetition(found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def _without_repetition(found: Sequence[list[str]]) -> Iterator[list[str]]:
    before: list[str] = []
    for row in found:
        same_task, same_budget = row[:1] == before[:1], row[:2] == before[:2]
        yield ["" if same_task else row[0], "" if same_budget else row[1], *row[2:]]
        before = row


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if number < _LABELS else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
