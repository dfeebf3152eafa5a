"""A report as a picture of four charts, for papers and slides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mimose.reporting.page.contents import Contents
from mimose.reporting.page.size_figures import SizeFigures

_PLAN, _KEEP, _RECOMPUTE, _BUDGET, _GREY = "#0b8a7d", "#2f6fb5", "#e07b29", "#c22f4a", "#a3a9b3"
_ON_HOST, _FROM_HOST = "#9bbfe3", "#f2c9a1"


def draw(contents: Contents, path: Path) -> None:
    """Draw the report to a file; needs matplotlib."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and needs a display

    figure = Figure(figsize=(13, 9), layout="constrained", dpi=150)
    (steps, within), (sizes, blocks) = figure.subplots(2, 2)
    scale = _Scale(max(contents.summary.budget_bytes, contents.summary.peak_bytes))
    _draw_steps(steps, contents, scale)
    if contents.sizes:
        _draw_within(within, contents, contents.sizes[-1])
        _draw_sizes(sizes, contents)
        _draw_blocks(blocks, contents)
    for axes in (steps, within, sizes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    figure.savefig(path)


class _Scale:
    """Converts bytes to GiB or MiB."""

    def __init__(self, most: int) -> None:
        self.unit, self.name = (1 << 30, "GiB") if most >= 1 << 30 else (1 << 20, "MiB")

    def __call__(self, number_of_bytes: int) -> float:
        return number_of_bytes / self.unit


def _draw_steps(axes: Any, contents: Contents, scale: _Scale) -> None:
    columns = contents.steps
    rows = list(zip(columns["number"], columns["peak"], columns["plan"], strict=True))
    for planned, colour, name in ((True, _PLAN, "planned"), (False, _GREY, "observed")):
        shown = [(n, scale(p)) for n, p, plan in rows if p and (plan is not None) == planned]
        axes.plot(*zip(*shown, strict=True) if shown else ([], []), ".", color=colour, label=name)
    axes.axhline(
        scale(contents.summary.budget_bytes), color=_BUDGET, linestyle="--", label="budget"
    )
    axes.set(title="Peak of every step", xlabel="step", ylabel=scale.name)
    axes.legend(frameon=False, loc="lower right")


def _draw_within(axes: Any, contents: Contents, size: SizeFigures) -> None:
    scale = _Scale(size.kept_peak_bytes)
    named = (("kept", _KEEP, "all kept"), ("recomputed", _RECOMPUTE, "all recomputed"),
             ("plan", _PLAN, "mimose's plan"))  # fmt: skip
    for key, colour, name in named:
        moments = size.curves[key]
        times = [0.0, *(seconds * 1e3 for *_, seconds, _ in moments)]
        levels = [scale(size.base_bytes), *(scale(level) for *_, level in moments)]
        axes.plot(times, levels, color=colour, label=name, linewidth=2 if key == "plan" else 1.2)
    axes.axhline(scale(contents.summary.budget_bytes), color=_BUDGET, linestyle="--")
    bound = f": at most, measured at {size.at_most_as}" if size.at_most_as else ""
    axes.set(
        title=f"Within one step of {size.label}{bound}", xlabel="estimated ms", ylabel=scale.name
    )
    axes.legend(frameon=False)


def _draw_sizes(axes: Any, contents: Contents) -> None:
    scale = _Scale(contents.sizes[-1].kept_peak_bytes)
    sizes = [size for size in contents.sizes if size.at_most_as is None]
    at, mark = [size.x for size in sizes], "-" if contents.one_way and len(sizes) > 1 else "."
    axes.plot(at, [scale(s.kept_peak_bytes) for s in sizes], mark, color=_KEEP,
              label="all kept")  # fmt: skip
    axes.plot(at, [scale(s.recomputed_peak_bytes) for s in sizes], mark, color=_RECOMPUTE,
              label="all recomputed")  # fmt: skip
    axes.plot(at, [scale(s.plan_peak_bytes) for s in sizes], mark, color=_PLAN,
              label="mimose's plan")  # fmt: skip
    columns = contents.steps
    rows = zip(columns["x"], columns["peak"], columns["plan"], strict=True)
    real = [(x, scale(peak)) for x, peak, plan in rows if x is not None and peak and plan]
    axes.plot(*zip(*real, strict=True) if real else ([], []), ".", color=_PLAN, label="real peaks")
    axes.axhline(scale(contents.summary.budget_bytes), color=_BUDGET, linestyle="--")
    axes.set(title="Peak against input size", xlabel=contents.x_label, ylabel=scale.name)
    axes.legend(frameon=False)


def _draw_blocks(axes: Any, contents: Contents) -> None:
    from matplotlib.colors import ListedColormap

    codes = {"K": 0, "H": 1, "r": 2, "h": 3, "f": 4}
    rows = [[codes[s.plan[k]] for s in contents.sizes] for k in range(len(contents.runs))]
    colours = ListedColormap([_KEEP, _ON_HOST, _RECOMPUTE, _FROM_HOST, _GREY])
    axes.imshow(rows, aspect="auto", cmap=colours, vmin=0, vmax=4, interpolation="nearest")
    every = max(1, len(contents.sizes) // 8)
    shown = range(0, len(contents.sizes), every)
    axes.set_xticks(list(shown), [str(contents.sizes[i].x) for i in shown])
    some = range(0, len(contents.runs), max(1, len(contents.runs) // 16))
    # matplotlib would parse a dollar sign in a name as mathematics.
    axes.set_yticks(list(some), [contents.runs[k][-28:].replace("$", r"\$") for k in some])
    title = "Kept (blue) and recomputed (orange)"
    if any(letter in "Hh" for size in contents.sizes for letter in size.plan):
        title += "; light: with host memory"
    axes.set(title=title, xlabel=contents.x_label)
