"""Figures of a results file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mimose.bench.analysis import Sheet
from mimose.bench.contestants import Given
from mimose.bench.extras import need
from mimose.bench.harness import Steps
from mimose.bench.playback import only
from mimose.bench.workloads import TASKS
from mimose.costs import InputSize
from mimose.units import GIB

_COLOURS = {
    "plain": "tab:gray",
    "torch-all": "tab:orange",
    "hf": "tab:olive",
    "hf-every-n": "tab:brown",
    "static": "tab:purple",
    "static-drawn": "mediumpurple",
    "paper": "darkgreen",
    "greedy+shuttle": "tab:green",
    "dtr": "tab:red",
    "dtr-uncapped": "salmon",
    "mimose-two-options": "lightskyblue",
    "mimose": "tab:blue",
    "oracle": "black",
    "compile-budget": "tab:pink",
    "mimose-compiled": "tab:cyan",
}

Draw = Callable[[Sheet, str, Any], None]


def draw_all(sheet: Sheet, folder: Path) -> list[tuple[str, str]]:
    """Every figure as a file; its name and what it shows."""
    need("matplotlib").use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        (_drawn(sheet, folder / f"{name}.png", draws), caption)
        for name, caption, *draws in _FIGURES
        if sheet.tasks
    ]


def _drawn(sheet: Sheet, path: Path, draws: Sequence[Draw]) -> str:
    """A column a task; a row for each of several drawings, else three columns."""
    from matplotlib import pyplot

    tasks = sheet.tasks
    columns = len(tasks) if len(draws) > 1 else min(3, len(tasks))
    rows = len(draws) if len(draws) > 1 else -(-len(tasks) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(draws) * len(tasks) :]:
        axis.set_visible(False)
    panels = [(draw, task) for draw in draws for task in tasks]
    for (draw, task), axis in zip(panels, axes.flat, strict=False):
        axis.set_title(task)
        draw(sheet, task, axis)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path.name


def time_by_budget(sheet: Sheet, task: str, axis: Any) -> None:
    budgets = [limit["total_bytes"] for limit in sheet.limits(task)]
    for name in sheet.contestants(task):
        found = [(b, r) for b in budgets if (r := sheet.ratio(task, b, name, "plain")) is not None]
        if found:
            x = [b / GIB for b, _ in found]
            y = [r.median for _, r in found]
            around = [[r.median - r.low for _, r in found], [r.high - r.median for _, r in found]]
            axis.errorbar(x, y, yerr=around, marker="o", label=name, color=_COLOURS[name])
    _stars(sheet, task, axis)
    _labels(axis, "budget, GiB", "time / plain")


def _stars(sheet: Sheet, task: str, axis: Any) -> None:
    """The paper's stars: everything recomputed, and everything kept."""
    survey, limits = sheet.results.surveys[task], sheet.limits(task)
    axis.plot(survey.kept_bytes(survey.largest) / GIB, 1.0, "*", color=_COLOURS["plain"], ms=12)
    slower = sheet.ratio(task, limits[0]["total_bytes"], "torch-all", "plain") if limits else None
    if slower is not None:
        least = survey.needed_bytes / GIB
        axis.plot(least, slower.median, "*", color=_COLOURS["torch-all"], ms=12)


def overhead(sheet: Sheet, task: str, axis: Any) -> None:
    cells = [
        (f"{who}\n{limit['label']}", found[0])
        for limit in sheet.limits(task)
        for who in ("mimose", "greedy+shuttle")
        if (found := sheet.overhead(task, limit["total_bytes"], who))
    ]
    names, bottoms = [name for name, _ in cells], np.zeros(len(cells))
    for part in ("collector", "estimator", "planner"):
        heights = np.array([getattr(spent, part) for _, spent in cells])
        axis.bar(names, heights, bottom=bottoms, label=part)
        bottoms = bottoms + heights
    axis.axhline(3.95, color="tab:red", linestyle=":", label="the paper's")
    axis.tick_params(axis="x", labelsize=6)
    _labels(axis, "", "iterations")


def memory_by_length(sheet: Sheet, task: str, axis: Any) -> None:
    for number, limit in enumerate(sheet.limits(task)):
        runs = sheet.runs(task, limit["total_bytes"], "mimose")
        if not runs:
            continue
        steps, colour = runs[min(runs)].steps, f"C{number}"
        axis.axhline(limit["total_bytes"] / GIB, color=colour, linewidth=0.8, linestyle="--")
        x = _extents(task, steps)
        axis.plot(x, _gib(steps.peak_bytes), ".", color=colour, label=limit["label"])
        axis.plot(*_where_known(x, steps.predicted_bytes), "x", color=colour, alpha=0.5, ms=5)
    _labels(axis, TASKS[task].source.axis, "GiB: · real, × predicted, -- budget")


def lengths(sheet: Sheet, task: str, axis: Any) -> None:
    survey, steps = sheet.results.surveys[task], _any_steps(sheet, task)
    if steps is None:
        return
    axis.hist(_extents(task, steps), bins=30, color="lightgray")
    _labels(axis, TASKS[task].source.axis, "batches")
    peaks = axis.twinx()
    seen = sorted(survey.full_batches, key=lambda o: (_extent(task, o.size), o.size.dims))
    x = [_extent(task, o.size) for o in seen]
    peaks.plot(x, _gib([survey.kept_bytes(o.size) for o in seen]), "C0.-", label="all kept")
    peaks.plot(
        x, _gib([survey.recomputed_bytes(o.size) for o in seen]), "C1.-", label="all recomputed"
    )
    peaks.set_ylabel("peak, GiB")
    peaks.legend(fontsize=7)


def single_block(sheet: Sheet, task: str, axis: Any) -> None:
    survey = sheet.results.surveys[task]
    blocks = range(len(survey.single_block_bytes))
    pattern = survey.observations[0].pattern
    predicted = [
        survey.peak(survey.largest, Given(only(block, pattern).values())) for block in blocks
    ]
    axis.axhline(survey.kept_bytes(survey.largest) / GIB, color="gray", label="none recomputed")
    axis.plot(blocks, _gib(survey.single_block_bytes), "C0o", label="measured")
    axis.plot(blocks, _gib(predicted), "C1x", label="by the timeline")
    _labels(axis, "the one block that is recomputed", "peak, GiB")


def step_time(sheet: Sheet, task: str, axis: Any) -> None:
    budget = _middle_budget(sheet, task)
    for name, x, steps in _compared(sheet, task, budget):
        axis.plot(x, steps.milliseconds, ".", color=_COLOURS[name], label=name)
    times = [v for _, _, steps in _compared(sheet, task, budget) for v in steps.milliseconds]
    if times:  # the first steps of a run would flatten all others
        axis.set_ylim(0, 1.3 * np.percentile(times, 98))
    _labels(axis, TASKS[task].source.axis, "step, ms")


def memory_held(sheet: Sheet, task: str, axis: Any) -> None:
    budget = _middle_budget(sheet, task)
    for name, x, steps in _compared(sheet, task, budget):
        axis.plot(x, _gib(steps.held_bytes), ".", color=_COLOURS[name], label=f"{name}, held")
        axis.plot(x, _gib(steps.peak_bytes), "_", color=_COLOURS[name], alpha=0.6)
    if budget:
        axis.axhline(budget / GIB, color="tab:red", linewidth=0.8, linestyle="--")
    _labels(axis, TASKS[task].source.axis, "GiB: · held, — in use, -- budget")


def _middle_budget(sheet: Sheet, task: str) -> int | None:
    limits = sheet.limits(task)
    return int(limits[len(limits) // 2]["total_bytes"]) if limits else None


def _compared(
    sheet: Sheet,
    task: str,
    budget: int | None,
    names: Sequence[str] = ("plain", "torch-all", "dtr", "mimose"),
) -> Iterator[tuple[str, list[float], Steps]]:
    """Some contestants in their last round: sizes and steps."""
    for name in names:
        runs = sheet.runs(task, budget, name)
        if runs:
            steps = runs[max(runs)].steps
            yield name, _extents(task, steps), steps


_BY_SIZE = ("static", "static-drawn", "mimose")


def unused(sheet: Sheet, task: str, axis: Any) -> None:
    budget = _middle_budget(sheet, task)
    if budget is None:
        return
    for name, x, steps in _compared(sheet, task, budget, _BY_SIZE):
        left = _gib(budget - peak for peak in steps.peak_bytes)
        axis.plot(x, left, ".", color=_COLOURS[name], label=name)
    _labels(axis, TASKS[task].source.axis, "budget less peak, GiB")


def slowdown_by_size(sheet: Sheet, task: str, axis: Any) -> None:
    budget = _middle_budget(sheet, task)
    plain = next((steps for _, _, steps in _compared(sheet, task, budget, ("plain",))), None)
    if plain is None:
        return
    for name, x, steps in _compared(sheet, task, budget, _BY_SIZE):
        pairs = zip(steps.milliseconds, plain.milliseconds, strict=True)
        slower = [mine / its if its else np.nan for mine, its in pairs]
        axis.plot(x, slower, ".", color=_COLOURS[name], label=name)
    axis.set_ylim(0.5, 2.5)  # observed steps and the first ones would flatten all others
    _labels(axis, TASKS[task].source.axis, "step / plain's")


def losses(sheet: Sheet, task: str, axis: Any) -> None:
    limits = sheet.limits(task)
    budget = limits[0]["total_bytes"] if limits else None
    for name, style in (("plain", "-"), ("mimose", ":")):
        runs = sheet.runs(task, budget, name)
        if runs:
            values = [np.nan if v is None else v for v in runs[min(runs)].steps.loss]
            axis.plot(values, style, color=_COLOURS[name], label=name)
    difference = sheet.loss_difference(task, budget, "mimose")
    if difference is not None:
        axis.text(0.02, 0.02, f"largest difference {difference:.2g}", transform=axis.transAxes)
    _labels(axis, "step", "loss")


def _labels(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _gib(values: Any) -> list[float]:
    return [value / GIB for value in values]


def _where_known(x: list[float], values: list[int | None]) -> tuple[list[float], list[float]]:
    known = [(a, v / GIB) for a, v in zip(x, values, strict=True) if v is not None]
    return [a for a, _ in known], [v for _, v in known]


def _any_steps(sheet: Sheet, task: str) -> Any:
    return next(_all_steps(sheet, task), None)


def _all_steps(sheet: Sheet, task: str) -> Iterator[Any]:
    for record in sheet.results.records.values():
        if record.task == task and record.run.missing is None:
            yield record.run.steps


def _extents(task: str, steps: Steps) -> list[float]:
    """The size of a sample in each step, for an axis."""
    return [TASKS[task].source.extent(lengths) for lengths in steps.lengths]


def _extent(task: str, size: InputSize) -> float:
    """The same of a size as mimose sees it, from the tensor with the most dimensions."""
    source, ends = TASKS[task].source, itertools.accumulate(rank for _, rank in size.layout)
    _, end = max(
        zip((rank for _, rank in size.layout), ends, strict=True), key=lambda pair: pair[0]
    )
    return source.extent(size.dims[end - source.sides : end])


_FIGURES: tuple[Any, ...] = (
    (
        "time-by-budget",
        "time of a whole run over plain training's, by budget; stars: all recomputed, all kept",
        time_by_budget,
    ),
    (
        "step-time-and-memory",
        "step time and memory by input size, at one budget",
        step_time,
        memory_held,
    ),
    ("memory-by-length", "mimose's peak by input size, predicted and real", memory_by_length),
    (
        "left-unused",
        "memory left unused and time lost by input size, at one budget: one plan for all, mimose",
        unused,
        slowdown_by_size,
    ),
    ("overhead", "what deciding costs, in iterations", overhead),
    ("lengths", "input sizes, and the memory that they need", lengths),
    ("single-block", "peak of the largest batch if one block is recomputed", single_block),
    ("losses", "loss, plain and mimose", losses),
)
