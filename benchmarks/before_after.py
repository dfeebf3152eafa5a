"""What a planned step costs on the host, before and after a change of mimose, by turns.

    git worktree add /tmp/before <commit>
    python benchmarks/before_after.py --before /tmp/before/src --out results.json

Three processes train one model with every block kept: plain, with the mimose of `--before`, and
with this one. They take turns, in a random order in each round. Reported is what each mimose adds
to plain training, and how long a decision from the cache takes. The models are BERT-base on 32×64
tokens and a Llama of one billion parameters in bf16 on 4×256 (`--model llama`).
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

LENGTHS = {"bert": (56, 60, 64), "llama": (240, 248, 256)}
ROWS = {"bert": 32, "llama": 4}
WARM_UP = 24
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
SMALL_LLAMA = {**SMALL, "num_key_value_heads": 2}


def work(mimose_is_on: bool, name: str, device: str) -> None:
    """Train a step for each line that comes in; write seconds, and seconds of deciding."""
    import torch

    import mimose
    from common import bert_base, llama_1b

    torch.manual_seed(0)
    small = SMALL if name == "bert" else SMALL_LLAMA
    size = {} if device == "cuda" else small
    if name == "bert":
        model = bert_base(**size).to(device).train()
    else:
        model = llama_1b(**size, use_cache=False).to(device, torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    handle = mimose.auto_checkpoint(model, "100%", planner="keep_all") if mimose_is_on else None
    batches = {}
    for n in LENGTHS[name]:
        tokens = torch.randint(5, 1000, (ROWS[name] if device == "cuda" else 2, n), device=device)
        labels = tokens if name == "llama" else torch.zeros_like(tokens[:, 0])
        batches[n] = {"input_ids": tokens, "labels": labels}

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

    def __init__(self, way: str, source: Path, model: str, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(FOLDER)])}
        command = [sys.executable, __file__, "--work", way, "--model", model, "--device", device]
        self._process = subprocess.Popen(
            [*command, "--out", os.devnull],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self, length: int) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(length, file=self._process.stdin, flush=True)
        took, decided = map(float, self._process.stdout.readline().split())
        return took, decided

    def close(self) -> None:
        self._process.communicate()


def measure(before: Path, model: str, device: str, rounds: int) -> dict[str, Any]:
    here = FOLDER.parent / "src"
    sources = {"plain": here, "before": before, "after": here}
    workers = {way: Worker(way, source, model, device) for way, source in sources.items()}
    draw, took = random.Random(0), {way: [] for way in workers}  # type: ignore[var-annotated]
    decided: dict[str, list[float]] = {"before": [], "after": []}
    for number in range(WARM_UP + rounds):
        length = draw.choice(LENGTHS[model])
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
    parser.add_argument("--model", choices=tuple(LENGTHS), default="bert")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", help="used by the script itself")
    options = parser.parse_args()
    if options.work:
        work(options.work != "plain", options.model, options.device)
        return
    results = {
        "benchmark": "before_after",
        **circumstances(options.allow_dirty),
        "model": options.model,
        "rounds": options.rounds,
        **measure(options.before, options.model, options.device, options.rounds),
    }
    save(results, options.out)
    print({name: results[name] for name in ("added_seconds", "deciding_seconds")})
    print(results["after_over_before"])


if __name__ == "__main__":
    main()
