"""Tables that answer the paper's: its stars, its Table 2, its Figs. 4 and 5, its predictions."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mimose.bench.analysis import Sheet, Spread
from mimose.bench.markdown import limit_text, table
from mimose.bench.time_spent import Overhead
from mimose.bench.waste import parts, waste
from mimose.bench.workloads import TASKS
from mimose.units import GIB

_TRAINING_SAMPLES = {
    "MC-Roberta": 73_546,  # SWAG: allenai/swag, "regular"
    "QA-XLNet": 87_599,  # SQuAD 1.1: rajpurkar/squad
    "QA-Bert": 87_599,
    "TC-Bert": 363_846,  # Quora question pairs: nyu-mll/glue, "qqp"
}
"""Examples in the split "train" of these data sets on huggingface.co, by their cards."""

HOW_TO_READ = """\
- *The two stars*: the peak of the largest batch drawn, with everything recomputed (the least that a
  budget can be) and with everything kept; and what recomputing everything costs.
- *What deciding costs, in milliseconds* (the paper's Table 2): collector, what an observed step
  takes beyond the oracle's; estimator, a fit; scheduler, a new plan. Then all of the run, plans
  from the cache included, and that in iterations of the oracle. The paper gives 146, 294, 119 and
  158 ms for each of ten observed steps.
- *New plans*: how many were made in the run, how many different sizes it has, and how many an epoch
  of the whole training set has. Plans are also made anew when the estimate changes, so there can be
  more plans than sizes. The paper made 17, 69, 24 and 51 plans in an epoch of its tasks.
- *Predicted peaks*: of full batches in planned steps of the first round, by how much the peak was
  predicted too low at worst, and too high on average and at worst. Not trusted: steps planned with
  an upper bound, or with a prediction that is not reliable yet (as where padding makes memory grow
  in steps); what they keep can be evicted.
- *Left unused* (the paper's Fig. 4): budget less the peak in use, the mean over all steps and over
  the shortest quarter of the batches; and the time on that quarter over plain training's.
- *At the loosest budget*: time over plain training's.
- *Deciding, recomputing and memory held* (the paper's Fig. 5): shares of a run's time. DTR's
  recomputing is what the forwards of evicted blocks had taken, mimose's is by its estimator. Held
  beyond use: the most that the allocator held in a step beyond that step's peak. The paper measured
  4.4 % for DTR's planning, up to 20.7 % for its recomputing, and 2.5 GB in fragments."""

_MEMORY_BOUND = ("static", "static-drawn", "paper", "greedy+shuttle", "dtr", "mimose", "oracle")


def sections(sheet: Sheet) -> Iterator[tuple[str, str]]:
    """A title and a table for each question that the results can answer."""
    makers: dict[str, Callable[[Sheet], str | None]] = {
        "The two stars": stars,
        "What deciding costs, in milliseconds": deciding,
        "New plans": plans_made,
        "Predicted peaks": predictions,
        "Left unused": left_unused,
        "At the loosest budget": loosest,
        "Deciding, recomputing and memory held": eviction,
    }
    for title, make in makers.items():
        text = make(sheet)
        if text is not None:
            yield title, text


def stars(sheet: Sheet) -> str:
    """The least and the most memory of each task's largest batch."""
    rows = []
    for task in sheet.tasks:
        survey, limits = sheet.results.surveys[task], sheet.limits(task)
        budget = limits[0]["total_bytes"] if limits else None
        slower = sheet.ratio(task, budget, "torch-all", "plain")
        peaks = (survey.needed_bytes, survey.kept_bytes(survey.largest))
        rows.append([task, *(f"{peak / GIB:.2f}" for peak in peaks), _text(slower)])
    header = ["task", "all recomputed, GiB", "all kept, GiB", "`torch-all` / plain"]
    return table(header, rows)


def deciding(sheet: Sheet) -> str | None:
    """The paper's Table 2, in milliseconds and in iterations."""
    rows = []
    for task, limit in _cells(sheet):
        for name in ("mimose", "greedy+shuttle", "paper"):
            found = sheet.overhead(task, limit["total_bytes"], name)
            if found:
                rows.append([task, limit_text(limit), name, *_costs(found)])
    header = ["task", "budget", "who", "collector, ms × observed", "estimator, ms × fits"]
    header += ["scheduler, ms × plans", "an iteration, ms", "all, ms", "all, iterations"]
    return table(header, rows) if rows else None


def _costs(found: Sequence[Overhead]) -> list[str]:
    one = found[0]
    each = [
        (one.collector * one.iteration_milliseconds, one.observed),
        (one.estimator * one.iteration_milliseconds, one.fits),
        ((one.plan_milliseconds or 0.0) * one.plans, one.plans),
    ]
    cells = [f"{ms / count:.2f} × {count}" if count else "–" for ms, count in each]
    whole = [e.collector + e.estimator + e.planner for e in found]
    ms = [n * e.iteration_milliseconds for n, e in zip(whole, found, strict=True)]
    cells.append(f"{one.iteration_milliseconds:.1f}")
    return [*cells, _text(Spread.of(ms), 0), _text(Spread.of(whole))]


def plans_made(sheet: Sheet) -> str | None:
    """How many plans were made, and how many sizes an epoch has."""
    rows = []
    for task, limit in _cells(sheet):
        for name in ("mimose", "greedy+shuttle", "paper"):
            runs = sheet.runs(task, limit["total_bytes"], name).values()
            counts = [run.spent["plans"] for run in runs if "plans" in run.spent]
            if counts:
                made = f"{statistics.median(counts):g}"
                sizes = str(sheet.sizes(task, sheet.results.conditions["steps"]))
                rows.append([task, limit_text(limit), name, made, sizes, _epoch(sheet, task)])
    header = ["task", "budget", "who", "new plans", "sizes in the run", "sizes in an epoch"]
    return table(header, rows) if rows else None


def _epoch(sheet: Sheet, task: str) -> str:
    """How many sizes an epoch of the training set has, where the model is the full one."""
    samples = _TRAINING_SAMPLES.get(task)
    if samples is None or sheet.results.conditions["small"]:
        return "–"
    steps = math.ceil(samples / (TASKS[task].rows * sheet.scale))
    return f"{sheet.sizes(task, steps)} in {steps:,} steps"


def predictions(sheet: Sheet) -> str | None:
    """How far predicted peaks were from real ones; and those not trusted, where there are any."""
    rows = []
    for task, limit in _cells(sheet):
        for name in ("mimose", "greedy+shuttle"):
            errors = sheet.prediction_errors(task, limit["total_bytes"], name)
            others = sheet.untrusted_errors(task, limit["total_bytes"], name)
            if errors or others:
                cells = [*_errors(errors), *_errors(others)]
                rows.append([task, limit_text(limit), name, *cells])
    header = ["task", "budget", "who", "steps", "too low, worst", "too high, mean"]
    header += ["too high, worst", "not trusted", "these too low, worst", "these too high, mean"]
    header.append("these too high, worst")
    if all(row[-4] == "0" for row in rows):
        header, rows = header[:-4], [row[:-4] for row in rows]
    return table(header, rows) if rows else None


def _errors(errors: Sequence[float]) -> list[str]:
    """How many, too low at worst, too high on average and at worst."""
    if not errors:
        return ["0", "–", "–", "–"]
    over = [max(error, 0.0) for error in errors]
    shares = (max(0.0, -min(errors)), statistics.fmean(over), max(over))
    return [str(len(errors)), *(f"{share:.3%}" for share in shares)]


def left_unused(sheet: Sheet) -> str | None:
    """Unused memory, and the loss on the shortest quarter; None without plain training."""
    rows = []
    for task, limit in _cells(sheet):
        for name in _MEMORY_BOUND:
            found = waste(sheet, task, limit["total_bytes"], name)
            if found:
                column = functools.partial(_column, found)
                mark = "" if sheet.fits(task, limit["total_bytes"], name) else " †"
                rows.append(
                    [
                        *(task, limit_text(limit), name + mark),
                        _text(column("unused_bytes"), 2, 1 / GIB),
                        _text(column("unused_bytes_of_short"), 2, 1 / GIB),
                        _text(column("short_over_plain")),
                    ]
                )
    header = ["task", "budget", "who", "unused, GiB", "unused on the shortest quarter, GiB"]
    return table([*header, "time on the shortest quarter / plain"], rows) if rows else None


def loosest(sheet: Sheet) -> str | None:
    """Times over plain training's at each task's largest budget."""
    ran = {name for task in sheet.tasks for name in sheet.contestants(task)}
    names = [name for name in _MEMORY_BOUND if name in ran]
    rows = []
    for task in sheet.tasks:
        limits = sheet.limits(task)
        if limits and sheet.runs(task, None, "plain"):
            budget = limits[-1]["total_bytes"]
            cells = (_text(sheet.ratio(task, budget, name, "plain"), 3) for name in names)
            rows.append([task, limit_text(limits[-1]), *cells])
    return table(["task", "budget", *names], rows) if rows and names else None


def eviction(sheet: Sheet) -> str | None:
    """Shares of deciding and recomputing, and memory held; None where DTR did not run."""
    rows = []
    for task, limit in _cells(sheet):
        budget = limit["total_bytes"]
        if not any(parts(sheet, task, budget, name) for name in ("dtr", "dtr-uncapped")):
            continue
        for name in ("dtr", "dtr-uncapped", "mimose"):
            found = parts(sheet, task, budget, name)
            if found:
                most_held = max(each.most_held_bytes for each in found)
                beyond = max(each.most_beyond_use_bytes for each in found)
                rows.append(
                    [
                        *(task, limit_text(limit), name),
                        _text(_column(found, "deciding"), 2, 100),
                        _text(_column(found, "recomputing"), 2, 100),
                        *(f"{most_held / budget:.3f}", f"{beyond / GIB:.3f}"),
                    ]
                )
    header = ["task", "budget", "who", "deciding, %", "recomputing, %", "most held / budget"]
    return table([*header, "held beyond use, GiB"], rows) if rows else None


def _cells(sheet: Sheet) -> Iterator[tuple[str, dict[str, Any]]]:
    for task in sheet.tasks:
        for limit in sheet.limits(task):
            yield task, limit


def _column(found: Sequence[Any], quantity: str) -> Spread | None:
    return Spread.of([getattr(each, quantity) for each in found])


def _text(spread: Spread | None, digits: int = 2, factor: float = 1.0) -> str:
    return "–" if spread is None else spread.text(digits, factor)
