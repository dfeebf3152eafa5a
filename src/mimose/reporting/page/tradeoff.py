"""A chart of the expected time of a step against the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mimose.costs import InputSize
from mimose.reporting.questions import Question

_POINTS = 24


def draw_tradeoff(question: Question, weights: Mapping[InputSize, float], path: Path) -> None:
    """Draw the chart to a file; needs matplotlib."""
    from matplotlib.figure import Figure

    ends = question.forecast(weights, [1 << 40])
    low, high = ends.least_budget_bytes, ends.easy_budget_bytes
    budgets = [int(low + (high - low) * i / (_POINTS - 1)) for i in range(_POINTS)]
    rows = question.forecast(weights, budgets).rows
    unit, name = (1 << 30, "GiB") if high >= 1 << 30 else (1 << 20, "MiB")
    at = [row.budget_bytes / unit for row in rows]
    timed = rows[0].step_seconds is not None
    times = [1e3 * (row.step_seconds if timed else row.recompute_seconds) for row in rows]  # type: ignore[operator]
    figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.plot(at, times, color="#0b8a7d", linewidth=2)
    axes.axvline(
        low / unit, color="#c22f4a", linestyle="--", label="below: the largest input does not fit"
    )
    axes.axvline(high / unit, color="#2f6fb5", linestyle="--", label="above: all blocks are kept")
    label = "expected ms per step" if timed else "expected ms of recompute per step"
    axes.set(xlabel=f"budget, {name}", ylabel=label, title=f"Inputs up to {ends.largest}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
