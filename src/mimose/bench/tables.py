"""Markdown tables of results files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mimose.bench.analysis import Sheet, Spread
from mimose.bench.goals import fullest, left_out_of_static
from mimose.bench.markdown import limit_text, table
from mimose.bench.time_spent import mean
from mimose.bench.workloads import PAPER_TASKS
from mimose.units import GIB, text_of

_RIVALS = (
    "torch-all",
    "hf",
    "hf-every-n",
    "static",
    "static-drawn",
    "paper",
    "greedy+shuttle",
    "dtr",
    "dtr-uncapped",
    "mimose-two-options",
    "oracle",
    "plain",
)


def ratios(sheet: Sheet) -> str:
    """mimose's time over everybody's."""
    ran = {name for task in sheet.tasks for name in sheet.contestants(task)}
    rivals = [name for name in _RIVALS if name in ran]
    rows, found = [], []
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            cells = [_Ratio.of(sheet, task, limit["total_bytes"], name) for name in rivals]
            rows.append([task, limit_text(limit), *(cell.text for cell in cells)])
            if task in PAPER_TASKS:
                found.append((task, cells))
    if len(found) > 1:
        rows.append(_mean_row("paper's tasks, mean", [cells for _, cells in found]))
        left_out = left_out_of_static(sheet) if "static" in rivals else []
        if left_out:
            rest = [cells for task, cells in found if task not in left_out]
            rows.append(_mean_row(f"without {', '.join(left_out)}, mean", rest))
    return table(["task", "budget", *(f"/ {name}" for name in rivals)], rows)


@dataclass(frozen=True, slots=True)
class _Ratio:
    """mimose's time over another's, in one cell of the table."""

    spread: Spread | None
    fits: bool
    """Whether the other's plan fits; if not, the cell is marked and not averaged in."""

    @classmethod
    def of(cls, sheet: Sheet, task: str, budget: int, rival: str) -> _Ratio:
        spread = sheet.ratio(task, budget, "mimose", rival)
        return cls(spread, spread is None or sheet.fits(task, budget, rival))

    @property
    def text(self) -> str:
        return (self.spread.text() if self.spread else "–") + ("" if self.fits else " †")

    @property
    def counted(self) -> float | None:
        return self.spread.median if self.spread and self.fits else None


def _mean_row(name: str, found: Sequence[Sequence[_Ratio]]) -> list[str]:
    columns = zip(*found, strict=True)
    means = [mean(c.counted for c in column if c.counted is not None) for column in columns]
    return [f"**{name}**", "", *(f"**{m:.3f}**" if m is not None else "–" for m in means)]


def plans(sheet: Sheet) -> str | None:
    """Blocks that mimose's plans and the paper's recompute; None where not both ran."""
    rows = []
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            both = sheet.recomputed_by_both(task, limit["total_bytes"], "mimose", "greedy+shuttle")
            if both is not None:
                rows.append([task, limit_text(limit), *(f"{n:.2f}" for n in both)])
    return table(["task", "budget", "mimose", "greedy+shuttle"], rows) if rows else None


def times(sheet: Sheet) -> str:
    """Every contestant: time, memory, what it recomputed, what went wrong."""
    rows = []
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            budget = limit["total_bytes"]
            for name in sheet.contestants(task):
                seconds = sheet.seconds(task, budget, name)
                if seconds is not None:
                    head = [task, limit_text(limit), name, seconds.text()]
                    rows.append([*head, *_details(sheet, task, budget, name)])
    header = ["task", "budget", "contestant", "seconds", "× plain", "median step, ms"]
    header += ["out of memory", "peak in use, GiB", "most held / budget", "recomputed"]
    return table([*header, "largest loss difference"], rows)


def _details(sheet: Sheet, task: str, budget: int, name: str) -> list[str]:
    runs = list(sheet.runs(task, budget, name).values())
    against = sheet.ratio(task, budget, name, "plain")
    middle = Spread.of([statistics.median(run.steps.milliseconds) for run in runs])
    peak = max(max(run.steps.peak_bytes) for run in runs)
    held = max(max(run.steps.held_bytes) for run in runs)
    done = [n for run in runs for n in run.steps.recomputed if n is not None]
    blocks = len(sheet.results.surveys[task].observations[0].pattern)
    difference = sheet.loss_difference(task, budget, name)
    return [
        against.text() if against else "–",
        middle.text(1) if middle else "–",
        str(sheet.out_of_memory(task, budget, name)),
        f"{peak / GIB:.3f}",
        f"{held / budget:.3f}",
        f"{statistics.fmean(done) / blocks:.0%}" if done else "–",
        f"{difference:.2g}" if difference is not None else "–",
    ]


def overhead(sheet: Sheet) -> str | None:
    """What mimose and the paper's system spend beyond the oracle; None without an oracle."""
    rows = []
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            for name in ("mimose", "greedy+shuttle", "paper"):
                found = sheet.overhead(task, limit["total_bytes"], name)
                if not found:
                    continue
                columns = [
                    Spread.of([getattr(each, quantity) for each in found])
                    for quantity in ("collector", "estimator", "planner", "whole")
                ]
                thousand = Spread.of([each.in_thousand_steps for each in found])
                times = [each.plan_milliseconds for each in found if each.plan_milliseconds]
                same = [each.same_plan_milliseconds for each in found]
                slower = Spread.of([each for each in same if each is not None])
                rows.append(
                    [
                        *(task, limit_text(limit), name),
                        *(str(n) for n in (found[0].steps, found[0].observed, found[0].plans)),
                        *(c.text(2) if c else "–" for c in columns),
                        thousand.text(2) if thousand else "–",
                        f"{statistics.median(times):.2f}" if times else "–",
                        slower.text(2) if slower else "–",
                    ]
                )
    header = ["task", "budget", "who", "steps", "observed", "new plans", "collector", "estimator"]
    header += ["planner", "whole difference", "parts in 1,000 steps", "a new plan, ms"]
    header += ["same plan, ms a step"]
    return table(header, rows) if rows else None


def breakdown(sheet: Sheet) -> str | None:
    """Where mimose's time goes; None without plain training to hold it against."""
    quantities = ("plain", "recomputing", "observing", "deciding", "rest")
    rows = []
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            found = sheet.breakdown(task, limit["total_bytes"])
            if found:
                cells = [Spread.of([getattr(each, name) for each in found]) for name in quantities]
                rows.append([task, limit_text(limit), *(c.text(3) if c else "–" for c in cells)])
    return table(["task", "budget", *quantities], rows) if rows else None


def papers_numbers(sheets: Sequence[Sheet]) -> str:
    """The paper's number beside ours on its tasks, where it gives one; of the smallest batch."""
    cells = [(sheet, *cell) for sheet in fullest(sheets)[:1] for cell in sheet.cells_of_paper]
    fitting = [c for c in cells if c[0].fits(*c[1:], "static")]
    static = [(c, r.median) for c in fitting if (r := c[0].ratio(*c[1:], "mimose", "static"))]
    left_out = left_out_of_static(cells[0][0]) if cells else []
    dtr = mean(r.median for c in cells if (r := c[0].ratio(*c[1:], "mimose", "dtr")))
    faster = _percent(mean(ratio for _, ratio in static))
    if static and left_out:
        rest = mean(ratio for cell, ratio in static if cell[1] not in left_out)
        faster += f"; {_percent(rest)} without {', '.join(left_out)}"
    errors = mean(abs(e) for c in cells for e in c[0].prediction_errors(*c[1:], "mimose"))
    spent = [o for c in cells for o in c[0].overhead(*c[1:], "mimose")]
    plans = [o.plan_milliseconds for o in spent if o.plan_milliseconds]
    parts = mean(o.collector + o.estimator + o.planner for o in spent)
    thousand = mean(o.in_thousand_steps for o in spent)
    reserves = [
        reserve
        for c in cells
        for run in c[0].runs(*c[1:], "mimose").values()
        if (reserve := run.spent["reserve_bytes"]) is not None  # no step got so far as to settle it
    ]
    rows = [
        ["faster than Sublinear (here: `static`)", "17.1 %", faster],
        ["faster than DTR", "15.0 %", _percent(dtr) if dtr is not None else "not compared"],
        ["one plan", "under 1 ms", f"{statistics.median(plans):.2f} ms" if plans else "–"],
        [
            "prediction error of memory, full batches",
            "0.3–0.5 %",
            f"{errors:.2%}" if errors is not None else "–",
        ],
        [
            "overhead in iterations",
            "3.95 in an epoch",
            f"{parts:.2f} in {spent[0].steps} steps; {thousand:.2f} in 1,000, extrapolated"
            if parts is not None and thousand is not None
            else "–",
        ],
        [
            "memory held in reserve",
            "0.5–1 GB",
            f"{text_of(min(reserves))} to {text_of(max(reserves))}" if reserves else "–",
        ],
    ]
    return table(["", "the paper", "here"], rows)


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{1 - ratio:.1%}"
