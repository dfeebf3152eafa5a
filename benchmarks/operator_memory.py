"""What do operators leave in memory, and how does it grow with the input? The paper's Figs. 8, 9.

    python benchmarks/operator_memory.py --out results.json
    python benchmarks/operator_memory.py --out results.json --figures folder   # draws, only

Traces the forward of each task at several sizes of a full batch, sums up what is in use at its end
by the class of the operators that made it, and fits polynomials of the input's size to that: the
padded length, or the area of images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import circumstances, parser_of, save
from mimose.bench.arena import Arena, Conditions
from mimose.bench.batches import BatchShape
from mimose.bench.circumstances import settle_device
from mimose.bench.extras import BenchError, need
from mimose.bench.workloads import TASKS
from mimose.comparison import kept_by_class, record_trace

CLOSE = 0.01
"""A polynomial describes the growth if it is nowhere further off, as a share of the largest."""


def traced(arena: Arena, sizes: int) -> list[dict[str, Any]]:
    """Bytes by class at each size, the smallest first."""
    source = arena.task.source
    shapes = source.samples(arena.shapes, sizes)
    with arena.trainee() as trainee:
        found = [
            {"extent": source.extent(shape.lengths), "lengths": shape.lengths}
            | {"bytes": kept_at(trainee, shape)}
            for shape in shapes
        ]
    return sorted(found, key=lambda row: float(row["extent"]))


def kept_at(trainee: Any, shape: BatchShape) -> dict[str, int]:
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs.clear()
        outputs.append(trainee.forward(trainee.batch(shape, 0)))

    trace = record_trace(forward, device=trainee.arena.device)
    outputs.clear()
    return kept_by_class(trace)


def growth(x: list[float], y: list[float]) -> int | None:
    """The least degree of a polynomial that describes the points; None if none up to two does."""
    for degree in range(3):
        if len(x) > degree + 1:
            off = np.abs(np.polyval(np.polyfit(x, y, degree), x) - y)
            if max(off) <= CLOSE * max(y):
                return degree
    return None


def by_class(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for row in reversed(rows) for name in row["bytes"])
    return {name: [row["bytes"].get(name, 0) for row in rows] for name in names}


def draw(task: str, rows: list[dict[str, Any]], folder: Path) -> None:
    need("matplotlib").use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    x = [row["extent"] for row in rows]
    for name, values in by_class(rows).items():
        axis.plot(x, [value / 2**20 for value in values], ".-", label=name)
    axis.set(title=task, xlabel=TASKS[task].source.axis, ylabel="kept by a forward, MiB")
    axis.legend(fontsize=7)
    figure.savefig(folder / f"operators-{task}.png", dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--sizes", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="small models, as on a CPU")
    parser.add_argument(
        "--figures", type=Path, help="measure nothing: draw a figure of each task in --out here"
    )
    options = parser.parse_args()
    if options.figures:
        for name, found in json.loads(options.out.read_text())["tasks"].items():
            draw(name, found["rows"], options.figures)
        return
    device = settle_device(None)
    results = {"benchmark": "operator_memory", **circumstances(options.allow_dirty), "tasks": {}}
    for name in options.tasks:
        conditions = Conditions(device=device, steps=100, small=options.small)
        try:
            rows = traced(Arena(TASKS[name], conditions), options.sizes)
        except BenchError as error:  # torchvision is missing
            print(f"{name}: {error}", flush=True)
            continue
        x = [row["extent"] for row in rows]
        degrees = {kind: growth(x, values) for kind, values in by_class(rows).items()}
        results["tasks"][name] = {
            "axis": TASKS[name].source.axis,
            "rows": rows,
            "degrees": degrees,
        }
        print(name, degrees, flush=True)
        save(results, options.out)


if __name__ == "__main__":
    main()
