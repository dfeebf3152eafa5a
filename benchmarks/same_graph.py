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
_AT_ONCE, _LEVELS = ("greedy", "greedy_literal"), 400
"""Planners that exceed some budgets and fit smaller ones: so many budgets are tried."""

Fits = Callable[[int], bool]


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
) -> dict[str, dict[str, float] | None]:
    """From which bytes on each planner fits; of Checkmate, whose answers take long, nothing."""
    most = found.easy_budget_bytes
    return {
        name: (scanned if name in _AT_ONCE else halved)(fits, most)
        for name, fits in fitting(profile, planners, trace).items()
    }


def fitting(profile: Profile, planners: Planners, trace: Trace) -> dict[str, Fits]:
    """For each planner, whether it fits so many bytes."""
    bare, prelude = replace(profile, link=None), profile.prelude or 0

    def asked(name: str, plan: Any, costs: Profile) -> Fits:
        return lambda bytes_: cell_of(name, plan, costs, bytes_ - prelude).fits

    found = {name: asked(name, plan, bare) for name, plan in planners.items()}
    found.pop("checkmate", None)
    found[WITH_HOST] = asked(WITH_HOST, Optimal().plan, profile)
    found["dtr"] = lambda bytes_: cell_of_dtr(trace, bytes_).fits
    return found


def scanned(fits: Fits, most: int) -> dict[str, float] | None:
    """The least of evenly spaced bytes that fit, and the share of those above that do not."""
    levels = [most * number // _LEVELS for number in range(1, _LEVELS + 1)]
    fitted = [fits(level) for level in levels]
    if not any(fitted):
        return None
    first = fitted.index(True)
    above = fitted[first:]
    return {"bytes": levels[first], "exceeds_above": above.count(False) / len(above)}


def halved(fits: Fits, most: int) -> dict[str, float] | None:
    """The least bytes that fit, by halving: for planners that fit more bytes, too."""
    if not fits(most):
        return None
    too_little, enough = 0, most
    for _ in range(_HALVINGS):
        middle = (too_little + enough) // 2
        if fits(middle):
            enough = middle
        else:
            too_little = middle
    return {"bytes": enough, "exceeds_above": 0.0}


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
