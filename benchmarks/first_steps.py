"""Does the budget hold while little is known? Many short runs under a hard cap, in random order.

    python benchmarks/first_steps.py --out results.json --task QA-XLNet --budgets 7.12 5.56

Every run begins anew and draws its steps from the same lengths in another order, in a plain loop:
nothing that runs out of memory is run again.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import torch

import mimose
from common import circumstances, parser_of, save
from mimose.bench.circumstances import settle_device
from mimose.bench.measuring import LatestStep
from planner_quality import Bench
from tasks import TASKS


def run(bench: Bench, budget: int, seed: int, steps: int) -> dict[str, Any]:
    lengths = list(bench.lengths)
    random.Random(seed).shuffle(lengths)
    model, optimizer = bench.fresh()
    retries = bench.meter.read().retries
    failed, latest = [], LatestStep()
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        handle.subscribe(latest)
        for number, length in enumerate(lengths[:steps]):
            done = False
            try:
                bench.step(model, optimizer, length)
                done = True
            except torch.OutOfMemoryError:
                pass  # tidied up below, where the exception no longer holds on to the step's frames
            if not done:
                reserve = None if latest.start is None else latest.start.reserve_bytes
                failed.append({"step": number, "length": length, "reserve": reserve})
                optimizer.zero_grad()
                gc.collect()
    stats = handle.stats()
    return {
        "budget": budget,
        "seed": seed,
        "steps": steps,
        "failed": failed,
        "reserve": stats.reserve_bytes,
        "retries": bench.meter.read().retries - retries,
        "observed_steps": stats.observed_steps,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", default="QA-XLNet")
    parser.add_argument("--budgets", type=float, nargs="+", default=[7.12, 5.56], help="GiB")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=70)
    options = parser.parse_args()
    bench = Bench(TASKS[options.task], settle_device(None), 300, autocast=False)
    runs: list[dict[str, Any]] = []
    results = {
        "benchmark": "first_steps",
        **circumstances(options.allow_dirty),
        "runs": runs,
    }
    for seed in options.seeds:
        for gib in options.budgets:
            made = run(bench, int(gib * 2**30), seed, options.steps)
            runs.append({"task": options.task, **made})
            print(runs[-1], flush=True)
            save(results, options.out)


if __name__ == "__main__":
    main()
