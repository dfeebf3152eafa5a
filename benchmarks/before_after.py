"""What a planned step costs on the host, before and after a change of mimose, by turns.

    git worktree add /tmp/before <commit>
    python benchmarks/before_after.py --before /tmp/before/src --out results.json

Three processes train BERT-base 32×64 with every block kept: plain, with the mimose of `--before`,
and with this one. They take turns, in a random order in each round. Reported is what each mimose
adds to plain training, and how long a decision from the cache takes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import FOLDER, circumstances, parser_of, save, spread

LENGTHS = (56, 60, 64)
WARM_UP = 24


def work(mimose_is_on: bool, device: str) -> None:
    """Train a step for each line that comes in; write seconds, and seconds of deciding."""
    import torch

    import mimose
    from common import bert_base

    small = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    torch.manual_seed(0)
    model = bert_base(**({} if device == "cuda" else small)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    handle = mimose.auto_checkpoint(model, "100%", planner="keep_all") if mimose_is_on else None
    batches = {
        n: {
            "input_ids": torch.randint(5, 1000, (32 if device == "cuda" else 2, n), device=device),
            "labels": torch.zeros(32 if device == "cuda" else 2, dtype=torch.long, device=device),
        }
        for n in LENGTHS
    }

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for line in sys.stdin:
        decided = handle.stats().planning_seconds if handle else 0.0
        wait()
        began = time.perf_counter()
        model(**batches[int(line)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        took = time.perf_counter() - began
        decided = (handle.stats().planning_seconds if handle else 0.0) - decided
        print(took, decided, flush=True)


class Worker:
    """A process that trains."""

    def __init__(self, way: str, source: Path, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(FOLDER)])}
        command = [sys.executable, __file__, "--work", way, "--device", device, "--out", os.devnull]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, length: int) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(length, file=self._process.stdin, flush=True)
        took, decided = map(float, self._process.stdout.readline().split())
        return took, decided

    def close(self) -> None:
        self._process.communicate()


def measure(before: Path, device: str, rounds: int) -> dict[str, Any]:
    here = FOLDER.parent / "src"
    sources = {"plain": here, "before": before, "after": here}
    workers = {way: Worker(way, source, device) for way, source in sources.items()}
    draw, took = random.Random(0), {way: [] for way in workers}  # type: ignore[var-annotated]
    decided: dict[str, list[float]] = {"before": [], "after": []}
    for number in range(WARM_UP + rounds):
        length = draw.choice(LENGTHS)
        for way in draw.sample(list(workers), len(workers)):
            seconds, deciding = workers[way].step(length)
            if number >= WARM_UP:
                took[way].append(seconds)
                if way in decided:
                    decided[way].append(deciding)
    for worker in workers.values():
        worker.close()
    pairs = {way: zip(took[way], took["plain"], strict=True) for way in decided}
    added = {way: [a - b for a, b in both] for way, both in pairs.items()}
    return {
        "plain_seconds": spread(took["plain"]),
        "added_seconds": {way: spread(times) for way, times in added.items()},
        "deciding_seconds": {way: spread(times) for way, times in decided.items()},
        "after_over_before": spread(
            [a / b for a, b in zip(took["after"], took["before"], strict=True)]
        ),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, help="the `src` folder of the other mimose")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", help="used by the script itself")
    options = parser.parse_args()
    if options.work:
        work(options.work != "plain", options.device)
        return
    results = {
        "benchmark": "before_after",
        **circumstances(options.allow_dirty),
        "rounds": options.rounds,
        **measure(options.before, options.device, options.rounds),
    }
    save(results, options.out)
    print({name: results[name] for name in ("added_seconds", "deciding_seconds")})
    print(results["after_over_before"])


if __name__ == "__main__":
    main()
