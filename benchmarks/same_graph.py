"""Every planner on the same graphs, over budgets from below the floor to all kept.

    python benchmarks/same_graph.py graphs.tar.gz --out results.json --time-limit 60

Plans with what `record_graphs.py` has recorded. Nothing is trained, so any machine will do; times
of planning are those of the machine that runs this. Bytes count from what is in use before a step,
and no reserve is kept. The trace of each step tells what its operators took; scaled to the measured
step, since recording adds to short operators.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import circumstances, parser_of, save
from mimose.comparison import (
    WITH_HOST,
    Cell,
    Planners,
    SizeComparison,
    Trace,
    cell_of,
    cell_of_dtr,
    compare_size,
    draw,
    planners_of_the_field,
    read_trace,
)
from mimose.costs import Link, Profile
from mimose.planning import KeepAll, Optimal
from mimose.reporting import Outlook, read_recording
from record_graphs import INDEX

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Budgets: so far from all recomputed to all kept."""
BELOW = 0.8
"""And one below the floor, as a share of it."""
LINK = Link(to_host=50.0, from_host=50.0, host_bytes=1 << 40)
"""For plans with host memory: 50 GB/s each way, and more room than they use."""
_HALVINGS = 12
"""How often the interval is halved in which a planner's least budget lies."""


def compared(
    folder: Path, graph: dict[str, Any], size: dict[str, Any], planners: Planners
) -> dict[str, Any]:
    """One model at one size."""
    recording = read_recording(folder / graph["recording"])
    outlook = replace(Outlook.of(recording), floor_bytes=0, reserve_share=0.0, link=LINK)
    (wanted,) = {step.size for step in recording.steps if list(step.size.dims) == size["dims"]}
    profile, trace = outlook.profile(wanted), read_trace(folder / size["trace"])
    assert profile is not None, f"{wanted} was observed"
    scale = size["plain_seconds"] / (trace.nanoseconds / 1e9)
    found = compare_size(outlook, profile, planners, budgets(outlook, profile), trace)
    found = with_measured_times(found, scale)
    return {
        **asdict(found),
        "plain_seconds": size["plain_seconds"],
        "trace": about(trace, outlook, profile),
        "fits_from_bytes": fits_from(found, profile, planners, trace),
        "drawing": draw(found),
    }


def budgets(outlook: Outlook, profile: Profile) -> list[int]:
    bare = replace(profile, link=None)
    least, easy = outlook.least_budget(bare), outlook.easy_budget(bare)
    return [int(BELOW * least), *(int(least + share * (easy - least)) for share in SHARES)]


def with_measured_times(found: SizeComparison, scale: float) -> SizeComparison:
    """The same, with DTR's times scaled from those of the trace to those of the step."""

    def scaled(cell: Cell) -> Cell:
        factor = scale if cell.planner == "dtr" else 1.0
        return replace(cell, extra_seconds=cell.extra_seconds * factor)

    rows = (replace(row, cells=tuple(map(scaled, row.cells))) for row in found.rows)
    return replace(found, rows=tuple(rows))


def about(trace: Trace, outlook: Outlook, profile: Profile) -> dict[str, Any]:
    """The trace beside the timeline: two accounts of the same step."""
    kept = KeepAll().plan(replace(profile, link=None), 0)
    return {
        "calls": len(trace.calls),
        "seconds": trace.nanoseconds / 1e9,
        "peak_bytes": trace.peak_bytes - trace.constant_bytes,
        "timeline_peak_bytes": outlook.base_bytes(profile) + kept.peak_bytes,
    }


def fits_from(
    found: SizeComparison, profile: Profile, planners: Planners, trace: Trace
) -> dict[str, int | None]:
    """The least bytes with which each planner fits; of Checkmate, whose answers take long, none."""
    bare, prelude = replace(profile, link=None), profile.prelude or 0
    asked: dict[str, Callable[[int], Cell]] = {
        name: lambda bytes_, name=name, plan=plan: cell_of(name, plan, bare, bytes_ - prelude)  # type: ignore[misc]
        for name, plan in planners.items()
        if name != "checkmate"
    }
    asked[WITH_HOST] = lambda bytes_: cell_of(WITH_HOST, Optimal().plan, profile, bytes_ - prelude)
    asked["dtr"] = lambda bytes_: cell_of_dtr(trace, bytes_)
    return {
        name: least_that_fits(lambda bytes_, ask=ask: ask(bytes_).fits, found.easy_budget_bytes)  # type: ignore[misc]
        for name, ask in asked.items()
    }


def least_that_fits(fits: Callable[[int], bool], most: int) -> int | None:
    """By halving; None if not even the most fits."""
    if not fits(most):
        return None
    too_little, enough = 0, most
    for _ in range(_HALVINGS):
        middle = (too_little + enough) // 2
        if fits(middle):
            enough = middle
        else:
            too_little = middle
    return enough


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("graphs", type=Path, help="the archive that record_graphs.py has written")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of Checkmate's solver")
    options = parser.parse_args()
    planners, _ = planners_of_the_field(options.time_limit)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with tarfile.open(options.graphs) as archive:
            archive.extractall(folder, filter="data")
        index = json.loads((folder / INDEX).read_text())
        graphs = index.pop("graphs")
        results: dict[str, Any] = {
            "benchmark": "same_graph",
            **index,
            "planned": circumstances(options.allow_dirty),
            "time_limit_seconds": options.time_limit,
            "link": LINK.to_plain(),
            "graphs": {},
        }
        for name, graph in graphs.items():
            sizes = [compared(folder, graph, size, planners) for size in graph["sizes"]]
            results["graphs"][name] = {**graph, "sizes": sizes}
            save(results, options.out)
            print(name, "done", flush=True)


if __name__ == "__main__":
    main()
