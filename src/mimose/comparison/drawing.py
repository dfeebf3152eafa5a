"""A drawing of a comparison: extra time against the budget, a line for each planner (SVG)."""

from __future__ import annotations

from collections.abc import Iterator

from mimose.comparison.compare import Cell, SizeComparison
from mimose.units import text_of

_WIDTH, _HEIGHT = 800, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 200, 16, 44
_COLOURS = {
    "optimal": "#0b8a7d",
    "greedy": "#2f6fb5",
    "greedy_literal": "#7aa6d8",
    "sublinear": "#a05fb4",
    "rotor": "#d9822b",
    "checkmate": "#c22f4a",
}
_GREY = "#888888"

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
    scale = _Scale(size)
    parts = [*_axes(size, scale)]
    for number, cell in enumerate(size.rows[0].cells):
        parts += _line(size, scale, number, cell.planner)
    label = "Extra time of each planner by budget"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{label}" font-family="sans-serif" font-size="12">\n'
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
    bottom = _HEIGHT - _BOTTOM + 18
    for budget in (scale.low, (scale.low + scale.high) / 2, scale.high):
        yield _text(scale.at(budget, 0)[0], bottom, text_of(budget), "middle")
    yield _text(_LEFT, _HEIGHT - 8, "budget; time as a share of recomputing every block", "start")


def _text(x: float, y: float, text: str, anchor: str, colour: str = _GREY) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _line(size: SizeComparison, scale: _Scale, number: int, planner: str) -> Iterator[str]:
    colour = _COLOURS.get(planner, _GREY)
    points = [
        scale.at(row.budget_bytes, _share(cell, size))
        for row in size.rows
        if (cell := row.cells[number]).fits
    ]
    path = "L".join(f"{x} {y}" for x, y in points)
    if points:
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
    name = f"{planner} ({len(points)} of {len(size.rows)} fit)"
    yield _text(_WIDTH - _RIGHT + 10, _TOP + 14 + 20 * number, name, "start", colour)
