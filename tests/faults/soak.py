"""What takes minutes: thousands of faults, then tens of thousands of steps.

    python tests/faults/soak.py [--faults 5000] [--steps 20000] [--seed 0]

Prints what was run. The first trial that goes wrong is raised with its seed; `--seed N --faults 1`
runs that one again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from harness import Outcome, Trial, least_peak  # noqa: E402

import models  # noqa: E402
from loops import peak_of_plain, texts  # noqa: E402
from mimose.reporting import Recorder  # noqa: E402
from parts import Assembled  # noqa: E402

_CHECKS = 10
_GROWTH_BYTES = 16 << 20
"""How much the process may grow in all steps but the first tenth: arenas, no more."""

_LOG_BYTES = 300
"""What a step may add to the log."""


def faults(count: int, seed: int) -> None:
    """Random trials until this many faults have happened."""
    total, trials, began = Outcome(), 0, time.perf_counter()
    gc.collect()
    gc.freeze()  # each recovery collects garbage: what was there before is passed over
    while total.faults < count:
        outcome = Trial.of(seed + trials).run()
        total.faults += outcome.faults
        total.lost += outcome.lost
        total.recoveries += outcome.recoveries
        trials += 1
        if trials % 50 == 0:
            print(f"{total.faults} faults, seeds to {seed + trials - 1}", flush=True)
    gc.unfreeze()
    print(
        f"{total.faults} faults in {trials} trials (seeds {seed} to {seed + trials - 1}): "
        f"{total.recoveries} recoveries, {total.lost} errors raised as they should be, "
        f"{time.perf_counter() - began:.0f} s"
    )


def steps(count: int) -> None:
    """Small steps of random lengths: the process, the plan cache and the log stay bounded."""
    dice = random.Random(0)
    model = models.Encoder(2, width=16)
    batches = texts([dice.randint(8, 40) for _ in range(200)], batch=8)
    largest = [max(batches, key=lambda batch: batch["input_ids"].shape[1])] * 3
    low, high = least_peak(model, largest), peak_of_plain(model, largest)
    budget = max(1 << 20, (low + high) // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        with Assembled(model, budget) as handle:
            handle.subscribe(Recorder(log))

            def step(ids: torch.Tensor) -> None:
                model(ids).pow(2).mean().backward()

            sizes = []
            began = time.perf_counter()
            for i in range(count):
                handle.retry(step, dice.choice(batches)["input_ids"])
                optimizer.step()
                optimizer.zero_grad()
                if (i + 1) % (count // _CHECKS) == 0:
                    gc.collect()
                    sizes.append(_resident_bytes())
                    entries, written = len(handle.scheduler.cache), log.stat().st_size
                    print(
                        f"{i + 1} steps: {sizes[-1] >> 20} MiB resident, {entries} plans cached, "
                        f"{written >> 10} KiB of log",
                        flush=True,
                    )
                    assert entries <= 512, "the plan cache grows without end"
                    assert written < _LOG_BYTES * (i + 1), "the log is more than a line a step"
            stats = handle.stats()
    print(f"{time.perf_counter() - began:.0f} s\n{stats}")
    growth = sizes[-1] - sizes[0]
    assert growth <= _GROWTH_BYTES, f"the process has grown by {growth} bytes"
    assert stats.observed_steps < 50, "it observes without end"


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("mimose").setLevel(logging.ERROR)
    if chosen.faults:
        faults(chosen.faults, chosen.seed)
    if chosen.steps:
        steps(chosen.steps)


if __name__ == "__main__":
    main()
