"""The page *Same graph, every planner*: tables and drawings from the results of `same_graph.py`.

python benchmarks/field_page.py benchmarks/results/…-same_graph.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mimose.bench.report import fill

PAGE = Path(__file__).parent.parent / "docs" / "field.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

_LEGEND = (
    "Time of a step's forward and backward over that of plain training, by the costs that were "
    "measured. Bytes count beyond what is in use before the step. over: the planner takes its "
    "schedule to fit, but by the timeline it exceeds the bytes by so much. –: it finds nothing "
    "that fits. a ≥ b: the time limit was reached; no schedule of the planner's form is faster "
    "than b. Last line: the longest time of planning."
)


def sections(result: dict[str, Any]) -> Iterator[str]:
    """The part of the page between its marks."""
    yield about(result)
    yield least_memory(result)
    yield _LEGEND
    for name, graph in result["graphs"].items():
        for number, size in enumerate(graph["sizes"]):
            yield f"### {name}, {size['size']}"
            yield _headline(graph, size)
            yield f"![{name}, {size['size']}: time by bytes](images/{_drawing(name, number)})"
            yield by_budget(size)


def least_memory(result: dict[str, Any]) -> str:
    """From which share of the memory on each planner fits, and how long it planned at most."""
    sizes = [(name, size) for name, graph in result["graphs"].items() for size in graph["sizes"]]
    names = list(sizes[0][1]["fits_from_bytes"])
    rows = [[name, size["size"], *(_fits_from(size, one) for one in names)] for name, size in sizes]
    return _table(["model", "input", *names], rows)


def by_budget(size: dict[str, Any]) -> str:
    """A line for each budget, and one for the time of planning."""
    names = [cell["planner"] for cell in size["rows"][0]["cells"]]
    kept = size["easy_budget_bytes"]
    rows = [
        [
            f"{_gib(row['budget_bytes'])} ({row['budget_bytes'] / kept:.0%})",
            *(cell_text(cell, size["plain_seconds"]) for cell in row["cells"]),
        ]
        for row in size["rows"]
    ]
    columns = zip(*(row["cells"] for row in size["rows"]), strict=True)
    longest = (max(cell["planning_seconds"] for cell in column) for column in columns)
    rows.append(["planning", *(_seconds(one) for one in longest)])
    return _table(["GiB (of all kept)", *names], rows)


def about(result: dict[str, Any]) -> str:
    """Where it was recorded and planned, and what `least_memory` shows."""
    planned, link = result["planned"], result["link"]
    small = " Models in miniature." if result["small"] else ""
    return (
        f"Recorded on {result['machine']}, torch {result['torch']}, commit {result['commit'][:7]}, "
        f"{result['date']}; planned on {planned['machine']}, commit {planned['commit'][:7]}, with "
        f"{result['time_limit_seconds']:g} s for each of Checkmate's budgets. `optimal+host` has a "
        f"link of {link['to_host']:g} GB/s each way.{small} The least share of the memory of all "
        "kept with which each planner fits (Checkmate was not asked for it); and, for greedy "
        "planners, the share of the budgets above that they exceed:"
    )


def _headline(graph: dict[str, Any], size: dict[str, Any]) -> str:
    trace, whole, plain = size["trace"], size["whole_seconds"], size["plain_seconds"]
    apart = trace["peak_bytes"] / trace["timeline_peak_bytes"] - 1
    return (
        f"{size['blocks']} blocks, {graph['precision']}. A plain step takes {plain * 1e3:.1f} ms, "
        f"and recomputing all blocks {whole * 1e3:.1f} ms more. With everything kept, "
        f"{_gib(size['easy_budget_bytes'])} GiB are needed; with all blocks recomputed, "
        f"{_gib(size['least_budget_bytes'])} GiB. The trace has {trace['calls']:,} calls, which "
        f"took {trace['seconds'] * 1e3:.1f} ms one by one; its peak is {apart:+.2%} off the "
        "timeline's."
    )


def cell_text(cell: dict[str, Any], plain_seconds: float) -> str:
    """One planner under one budget: the time of a step over plain training's."""
    if cell["over_bytes"]:
        fits = f"over {cell['over_bytes'] / 2**20:.1f} MiB" if cell["claims_to_fit"] else "–"
    else:
        fits = f"{1 + cell['extra_seconds'] / plain_seconds:.3f}"
    if cell["timed_out"] and cell["bound_seconds"] is not None:
        fits += f" ≥ {1 + cell['bound_seconds'] / plain_seconds:.3f}"
    return fits


def _fits_from(size: dict[str, Any], planner: str) -> str:
    found = size["fits_from_bytes"][planner]
    if found is None:
        return "–"
    exceeds = found["exceeds_above"]
    least = f"{found['bytes'] / size['easy_budget_bytes']:.0%}"
    return f"{least}, over at {exceeds:.0%}" if exceeds else least


def _seconds(seconds: float) -> str:
    if not seconds:
        return "in the step"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _gib(number: float) -> str:
    gib = number / 2**30
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.4f}"


def _drawing(name: str, number: int) -> str:
    return f"field-{name.lower()}-{number}.svg"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(result: dict[str, Any], page: Path = PAGE) -> None:
    """Write the part of the page between its marks, and the drawings beside it."""
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    for name, graph in result["graphs"].items():
        for number, size in enumerate(graph["sizes"]):
            (images / _drawing(name, number)).write_text(size["drawing"] + "\n", "utf-8")
    fill(page, "\n\n".join(sections(result)), BEGIN, END)


def main() -> None:
    (path,) = sys.argv[1:]
    write(json.loads(Path(path).read_text()))


if __name__ == "__main__":
    main()
