"""A drawing of a comparison: extra time against the budget, a line for each planner (SVG).

Planners often need the same time. The lines of later planners are thinner and have gaps, so that
the lines below them stay visible; that of `optimal` is the thinnest, and on top.
"""

from __future__ import annotations

from collections.abc import Iterator

from mimose.comparison.compare import Cell, SizeComparison
from mimose.units import text_of

_WIDTH, _HEIGHT = 480, 300
"""Of the chart; the legend comes below. Narrow enough to be read where it is scaled to a phone."""
_SHOWN_WIDTH = 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 38, 14, 50
_ROW = 22
"""The height of a line of the legend."""
_COLOURS = {
    "optimal": "#0b8a7d",
    "optimal+host": "#5fc3b8",
    "greedy": "#2f6fb5",
    "greedy_literal": "#7aa6d8",
    "sublinear": "#a05fb4",
    "rotor": "#d9822b",
    "checkmate": "#c22f4a",
    "dtr": "#8a6d3b",
}
_GREY = "#808080"
_ON_TOP, _ON_TOP_WIDTH = "optimal", 1.5
_WIDEST, _THINNEST = 6.5, 4.5
"""Of the lines below it."""
_PERIOD = 48
"""Of dashes and gaps: in each, a part of every one of the lines that coincide is on top."""

Point = tuple[float, float]


class _Scale:
    """From budgets and times to places in the drawing."""

    def __init__(self, size: SizeComparison) -> None:
        budgets = [row.budget_bytes for row in size.rows]
        shares = [_share(cell, size) for row in size.rows for cell in row.cells if cell.fits]
        self.low, self.high = min(budgets), max(budgets)
        self.top = max([*shares, 1.0])

    def at(self, budget: float, share: float) -> Point:
        x = (budget - self.low) / max(1, self.high - self.low)
        y = 1 - share / self.top
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + x * width, 1), round(_TOP + y * height, 1)


def draw(size: SizeComparison) -> str:
    """The drawing as an SVG element. Budgets at which a planner does not fit have no point."""
    scale, planners = _Scale(size), [cell.planner for cell in size.rows[0].cells]
    parts = [*_axes(size, scale)]
    for number in sorted(range(len(planners)), key=lambda number: planners[number] == _ON_TOP):
        parts += _line(size, scale, number, _stroke(planners, number))
    for number in range(len(planners)):
        parts += _entry(size, number, _stroke(planners, number))
    height = _HEIGHT + _ROW * ((len(planners) + 1) // 2) + 4
    label = "Extra time of each planner by budget"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_SHOWN_WIDTH}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{label}" font-family="sans-serif" font-size="15">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _share(cell: Cell, size: SizeComparison) -> float:
    return cell.extra_seconds / size.whole_seconds if size.whole_seconds else 0.0


def _axes(size: SizeComparison, scale: _Scale) -> Iterator[str]:
    for part in range(5):
        share = scale.top * part / 4
        (x, y), (end, _) = scale.at(scale.low, share), scale.at(scale.high, share)
        yield f'<path d="M{x} {y}H{end}" stroke="{_GREY}" stroke-opacity="0.3"/>'
        yield _text(x - 8, y + 4, f"{share:.0%}", "end")
    bottom = _HEIGHT - _BOTTOM + 20
    for budget in sorted({scale.low, (scale.low + scale.high) / 2, scale.high}):
        yield _text(scale.at(budget, 0)[0], bottom, text_of(budget), "middle")
    yield _text(_LEFT, _HEIGHT - 8, "budget; time as a share of recomputing every block", "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{_GREY}">{text}</text>'


def _stroke(planners: list[str], number: int) -> tuple[float, str]:
    """The width of this planner's line, and its attributes."""
    colour = _COLOURS.get(planners[number], _GREY)
    if planners[number] == _ON_TOP:
        return _ON_TOP_WIDTH, f'stroke="{colour}" stroke-width="{_ON_TOP_WIDTH}"'
    others = [planner for planner in planners if planner != _ON_TOP]
    at = others.index(planners[number])
    width = round(_WIDEST - (_WIDEST - _THINNEST) * at / max(1, len(others) - 1), 1)
    gap = round(_PERIOD * at / len(others), 1)
    gaps = f' stroke-dasharray="{_PERIOD - gap:g} {gap:g}"' if at else ""
    return width, f'stroke="{colour}" stroke-width="{width}"{gaps}'


def _line(
    size: SizeComparison, scale: _Scale, number: int, stroke: tuple[float, str]
) -> Iterator[str]:
    width, attributes = stroke
    points = [
        scale.at(row.budget_bytes, _share(cell, size))
        for row in size.rows
        if (cell := row.cells[number]).fits
    ]
    path = "L".join(f"{x} {y}" for x, y in points)
    if points:
        yield f'<path d="M{path}" fill="none" {attributes}/>'
    colour = _COLOURS.get(size.rows[0].cells[number].planner, _GREY)
    for x, y in points:
        yield f'<circle cx="{x}" cy="{y}" r="{width / 2 + 1:g}" fill="{colour}"/>'


def _entry(size: SizeComparison, number: int, stroke: tuple[float, str]) -> Iterator[str]:
    """The planner in the legend, which has two columns."""
    fits = sum(row.cells[number].fits for row in size.rows)
    x, y = 8 + number % 2 * _WIDTH / 2, _HEIGHT + 14 + number // 2 * _ROW
    name = f"{size.rows[0].cells[number].planner} ({fits} of {len(size.rows)} fit)"
    yield f'<path d="M{x:g} {y - 5}h{_PERIOD}" {stroke[1]}/>'
    yield _text(x + _PERIOD + 8, y, name, "start")
