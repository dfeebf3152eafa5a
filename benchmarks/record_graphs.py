"""Record what planners are compared on: BERT-base, XLNet-base, Llama-1B and Swin-T, two sizes each.

    python benchmarks/record_graphs.py --out graphs.tar.gz

For each model: a recording in which every step is observed with every block recomputed, an operator
trace of a step at each size, and the time of a plain forward and backward. `same_graph.py` plans
with them, on any machine. The archive is written again after each model.
"""

from __future__ import annotations

import json
import statistics
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import circumstances, parser_of
from mimose.bench.arena import Arena, Conditions, Trainee, synchronize
from mimose.bench.batches import BatchShape
from mimose.bench.circumstances import settle_device
from mimose.bench.measuring import Observer
from mimose.bench.workloads import TASKS
from mimose.comparison import record_trace, write_trace
from mimose.planning import Optimal
from mimose.reporting import Recorder

INDEX = "index.json"
_OBSERVED = 4
"""Observed steps of each size; the first step of all is a trial of every block."""
_WARM, _TIMED = 3, 10
"""Plain steps before those that are timed, and those that are."""


@dataclass(frozen=True)
class Graph:
    """A model of the benchmark, and the two sizes that it is recorded at."""

    task: str
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    small: tuple[tuple[int, ...], tuple[int, ...]]
    """The sizes for models in miniature."""

    def shapes(self, small: bool) -> list[BatchShape]:
        rows = 4 if small else TASKS[self.task].rows
        return [BatchShape(rows, lengths) for lengths in (self.small if small else self.sizes)]


GRAPHS = {
    "BERT-base": Graph("QA-Bert", ((192,), (384,)), ((48,), (96,))),
    "XLNet-base": Graph("QA-XLNet", ((192,), (384,)), ((48,), (96,))),
    "Llama-1B": Graph("SFT-Llama", ((512,), (2048,)), ((64,), (128,))),
    "Swin-T": Graph("Swin-T", ((256, 341), (448, 597)), ((64, 85), (112, 149))),
}


def recorded(name: str, arena: Arena, shapes: list[BatchShape], folder: Path) -> dict[str, Any]:
    """Record a model into files of this folder; what the index says of it."""
    with arena.trainee() as trainee:
        sizes = []
        for number, shape in enumerate(shapes):
            file = f"{name}-{number}.trace.jsonl"
            write_trace(trace_of(trainee, shape), folder / file)
            seconds = plain_seconds(trainee, shape)
            dims = arena.size_of(shape).dims
            sizes.append({"dims": dims, "trace": file, "plain_seconds": seconds})
        observe(trainee, shapes, folder / f"{name}.jsonl")
    return {
        "task": arena.task.name,
        "precision": arena.precision,
        "recording": f"{name}.jsonl",
        "sizes": sizes,
    }


def step(trainee: Trainee, shape: BatchShape) -> None:
    trainee.optimizer.zero_grad()
    trainee.forward(trainee.batch(shape, 0)).backward()


def trace_of(trainee: Trainee, shape: BatchShape) -> Any:
    batch = trainee.batch(shape, 0)  # before the step, so that its bytes are constants

    def traced() -> None:
        trainee.optimizer.zero_grad()
        trainee.forward(batch).backward()

    return record_trace(traced, device=trainee.arena.device, warm_up_steps=2)


def plain_seconds(trainee: Trainee, shape: BatchShape) -> float:
    """The median time of a forward and backward without checkpointing."""
    took = []
    for _ in range(_WARM + _TIMED):
        batch = trainee.batch(shape, 0)
        trainee.optimizer.zero_grad()
        synchronize(trainee.arena.device)
        began = time.perf_counter()
        trainee.forward(batch).backward()
        synchronize(trainee.arena.device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[_WARM:])


def observe(trainee: Trainee, shapes: list[BatchShape], file: Path) -> None:
    """Train with every step observed, and record what was seen."""
    observer = Observer(trainee.model, Optimal(), trainee.arena.input_size)
    recorder = Recorder(file)
    observer.engine.events.subscribe(recorder)
    for shape in [shapes[-1], *shapes * _OBSERVED]:
        step(trainee, shape)
        synchronize(trainee.arena.device)  # or times would not be known yet
        observer.engine.read_observations()
    observer.detach()
    recorder.run_ends()


def pack(folder: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--small", action="store_true", help="models in miniature, as on a CPU")
    options = parser.parse_args()
    device = settle_device(None)
    index: dict[str, Any] = {**circumstances(options.allow_dirty), "small": options.small}
    index["graphs"] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in options.graphs:
            began, graph = time.perf_counter(), GRAPHS[name]
            arena = Arena(
                TASKS[graph.task], Conditions(device=device, steps=2, small=options.small)
            )
            index["graphs"][name] = recorded(name, arena, graph.shapes(options.small), folder)
            (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
            pack(folder, options.out)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
