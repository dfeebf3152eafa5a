"""A comparison in words and tables, as text for a terminal, Markdown or HTML."""

from __future__ import annotations

import html

from mimose.comparison.compare import DTR, Cell, Comparison, SizeComparison
from mimose.comparison.drawing import draw
from mimose.reporting import static_page
from mimose.units import text_of

_STYLE = """
.card :is(th, td) { text-align: right; white-space: nowrap; }
.card h2 { margin-top: 24px; }
.card table + p { margin-top: 16px; }
"""

LEGEND = (
    "Extra time as a share of the time of recomputing every block once. Peaks come from the "
    "timeline. over: the planner considers its schedule to fit, but it exceeds the budget by this "
    "much. –: the planner finds nothing that fits. ≥: the time limit was reached; no schedule of "
    "the planner's form is faster than this."
)


def headline(size: SizeComparison) -> str:
    """What is compared, and between which budgets."""
    return (
        f"Input {size.size}, {size.blocks} blocks. Recomputing all takes "
        f"{size.whole_seconds * 1e3:.1f} ms and fits from {text_of(size.least_budget_bytes)} on; "
        f"from {text_of(size.easy_budget_bytes)} on everything is kept."
    )


def columns(size: SizeComparison) -> list[str]:
    """The names of the columns: the budget, then each planner."""
    return ["budget", *(cell.planner for cell in size.rows[0].cells)]


def cells(size: SizeComparison) -> list[list[str]]:
    """A line for each budget, and one for the time of planning."""
    lines = [
        [text_of(row.budget_bytes), *(cell_text(cell, size.whole_seconds) for cell in row.cells)]
        for row in size.rows
    ]
    return [*lines, ["planning", *_planning_times(size)]]


def cell_text(cell: Cell, whole_seconds: float) -> str:
    """One planner under one budget."""
    if not cell.fits:
        text = f"over {text_of(cell.over_bytes)}" if cell.claims_to_fit else "–"
    else:
        text = _share(cell.extra_seconds, whole_seconds)
    if cell.timed_out and cell.bound_seconds is not None:
        text += f" ≥ {_share(cell.bound_seconds, whole_seconds)}"
    return text


def _share(seconds: float, whole_seconds: float) -> str:
    return f"{seconds / whole_seconds:.1%}" if whole_seconds else "0.0%"


def _planning_times(size: SizeComparison) -> list[str]:
    """The longest planning time over all budgets, for each planner."""
    columns = zip(*(row.cells for row in size.rows), strict=True)
    return [
        "in step"
        if column[0].planner == DTR
        else _time(max(cell.planning_seconds for cell in column))
        for column in columns
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def markdown_of_comparison(comparison: Comparison, title: str, pictures: list[str]) -> str:
    """A Markdown page; `pictures` are the file names of the drawings, one for each size."""
    parts = [f"# {title}"]
    for size, picture in zip(comparison.sizes, pictures, strict=True):
        names = columns(size)
        lines = [names, ["---:"] * len(names), *cells(size)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts += [f"## {size.size}", headline(size), f"![Time by budget]({picture})", table]
    return "\n\n".join([*parts, LEGEND, *comparison.remarks]) + "\n"


def page_of_comparison(comparison: Comparison, title: str) -> str:
    """One HTML file, with its drawings inside."""
    body = "\n".join(_section(size) for size in comparison.sizes)
    notes = "\n".join(f"<p>{html.escape(text)}</p>" for text in (LEGEND, *comparison.remarks))
    heading = f"<h1>{html.escape(title)}</h1>"
    return static_page(title, f"{heading}\n{body}\n{notes}", _STYLE)


def _section(size: SizeComparison) -> str:
    names = "".join(f"<th>{html.escape(name)}</th>" for name in columns(size))
    lines = "\n".join(
        f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line)}</tr>"
        for line in cells(size)
    )
    return (
        f"<h2>{html.escape(size.size)}</h2>\n<p>{html.escape(headline(size))}</p>\n{draw(size)}\n"
        f"<table><thead><tr>{names}</tr></thead><tbody>\n{lines}\n</tbody></table>"
    )
