"""What a planned step costs besides its plan, where every block is kept: on the host, by turns.

    python benchmarks/step_cost.py --out results.json

Four models of one kind take turns step by step: plain; with interceptors on its blocks that always
keep (a plan played back); with mimose, far from the limit; and with mimose near the limit, where
kept blocks are guarded and memory is read at the end. Reported is what each adds to plain training.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
from torch import nn

import mimose
from common import bert_base, circumstances, parser_of, save, spread
from mimose.bench.playback import Playback
from mimose.costs import Option
from mimose.interception import Attachment, find_blocks
from mimose.memory import configure_for_process

Batch = dict[str, torch.Tensor]

LENGTHS = (144, 146, 148, 150)
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}


class _Plain:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = bert_base(**({} if device == "cuda" else SMALL)).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self, batch: Batch) -> None:
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self, batches: dict[int, Batch]) -> None:
        """Every length several times, the longest first: observed, then planned."""
        for n in (max(LENGTHS), *LENGTHS, *LENGTHS, *LENGTHS):
            self.step(batches[n])


class _Interceptors(_Plain):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        blocks = find_blocks(self.model)
        self.playback, self.plan = Playback(), {(k, 0): Option.KEEP for k in range(len(blocks))}
        self.attachment = Attachment(self.model, blocks, self.playback)

    def step(self, batch: Batch) -> None:
        self.playback.begin(self.plan)
        super().step(batch)


class _Mimose(_Plain):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.handle = mimose.auto_checkpoint(self.model, "100%", planner="keep_all")


class _NearTheLimit(_Mimose):
    """A first run tells what the longest batch needs; the budget is that, and 4 % more."""

    def warm_up(self, batches: dict[int, Batch]) -> None:
        super().warm_up(batches)
        self.step(batches[max(LENGTHS)])
        predicted = self.handle.stats().last_predicted_peak_bytes
        if predicted is None:
            raise SystemExit("nothing is predicted after the warm-up: no budget can be chosen")
        self.handle.detach()
        budget = int(predicted / 0.96)
        self.handle = mimose.auto_checkpoint(self.model, budget, planner="keep_all")
        super().warm_up(batches)


WAYS: dict[str, type[_Plain]] = {
    "plain": _Plain,
    "interceptors that keep": _Interceptors,
    "mimose": _Mimose,
    "mimose near the limit": _NearTheLimit,
}


def measure(device: str, rounds: int) -> dict[str, Any]:
    ways = {name: way(device) for name, way in WAYS.items()}
    batches = {
        n: {
            "input_ids": torch.randint(5, 1000, (12, n), device=device),
            "labels": torch.zeros(12, dtype=torch.long, device=device),
        }
        for n in LENGTHS
    }
    for way in ways.values():
        way.warm_up(batches)
    gc.collect()
    gc.freeze()
    draw = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        batch = batches[draw.choice(LENGTHS)]
        for name in draw.sample(list(ways), len(ways)):
            _wait(device)
            began = time.perf_counter()
            ways[name].step(batch)
            _wait(device)
            seconds[name].append(time.perf_counter() - began)
    plain = seconds["plain"]
    added = {
        name: [a - b for a, b in zip(times, plain, strict=True)]
        for name, times in seconds.items()
        if name != "plain"
    }
    return {
        "plain_seconds": spread(plain),
        "added_seconds": {name: spread(times) for name, times in added.items()},
        "added_mean_seconds": {name: sum(times) / len(times) for name, times in added.items()},
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    configure_for_process()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {
        "benchmark": "step_cost",
        **circumstances(options.allow_dirty),
        "rounds": options.rounds,
    }
    results |= measure(device, options.rounds)
    save(results, options.out)
    for name, added in results["added_seconds"].items():
        print(f"{name}: {1e6 * added['median']:.0f} µs more than plain")


if __name__ == "__main__":
    main()
