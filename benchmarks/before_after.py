"""What a planned step costs on the host, before and after a change of mimose, by turns.

    git worktree add /tmp/before <commit>
    python benchmarks/before_after.py --before /tmp/before/src --out results.json

One process trains three copies of a model with every block kept: plain, with the mimose of
`--before`, and with this one. They take turns, in a random order in each round. Reported is what
each mimose adds to plain training, and how long a decision from the cache takes. The models are
BERT-base on 32×64 tokens (`bert`); a Llama of 16 layers in bf16 on 4×256 tokens, narrow enough that
the host decides how long a step takes (`llama`); and a chain of 200 blocks that do next to nothing,
which tells what one kept block costs (`chain`).
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from common import bert_base, circumstances, llama_1b, parser_of, save, spread
from mimose.bench.circumstances import settle_device

BLOCKS = 200
"""In the chain."""
WARM_UP = 24
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
NARROW = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024}

Batch = dict[str, torch.Tensor]


class Chain(nn.Module):
    """Blocks that do next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens_of(rows: int, lengths: tuple[int, ...], device: str, *, causal: bool) -> list[Batch]:
    batches = []
    for n in lengths:
        tokens = torch.randint(5, 1000, (rows, n), device=device)
        labels = tokens if causal else torch.zeros_like(tokens[:, 0])
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def bert(device: str) -> tuple[Callable[[], nn.Module], list[Batch]]:
    small = {} if device == "cuda" else SMALL
    rows = 32 if device == "cuda" else 2
    return lambda: bert_base(**small), tokens_of(rows, (56, 60, 64), device, causal=False)


def llama(device: str) -> tuple[Callable[[], nn.Module], list[Batch]]:
    size = {**(NARROW if device == "cuda" else SMALL), "num_key_value_heads": 2, "use_cache": False}
    batches = tokens_of(4, (240, 248, 256), device, causal=True)
    return lambda: llama_1b(**size).to(torch.bfloat16), batches


def chain(device: str) -> tuple[Callable[[], nn.Module], list[Batch]]:
    return Chain, [{"x": torch.ones(n, 1, device=device)} for n in (6, 7, 8)]


MODELS = {"bert": bert, "llama": llama, "chain": chain}


class Library:
    """One of two versions of mimose in this process."""

    def __init__(self, source: Path) -> None:
        self._modules: dict[str, ModuleType] = {}
        with self.in_place():
            sys.path.insert(0, str(source))
            self.mimose = importlib.import_module("mimose")
            sys.path.remove(str(source))
        found = Path(str(self.mimose.__file__)).parent.parent.resolve()
        assert found == source.resolve(), f"{found} was imported, and not {source}"

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Whatever is imported in this context is of this version."""
        others = _taken_out()
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = _taken_out()
            sys.modules.update(others)


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "mimose" or name.startswith("mimose.")]
    return {name: sys.modules.pop(name) for name in names}


class Trainee:
    """A model that trains, plainly or under a mimose that keeps every block."""

    def __init__(self, make: Callable[[], nn.Module], device: str, library: Library | None) -> None:
        torch.manual_seed(0)
        self.model = make().to(device).train()
        fused = {"fused": True} if device == "cuda" else {}
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4, **fused)
        self.handle = None
        if library is not None:
            named = {"blocks": "blocks.*"} if isinstance(self.model, Chain) else {}
            with library.in_place():
                self.handle = library.mimose.auto_checkpoint(
                    self.model, "100%", planner="keep_all", **named
                )

    def step(self, batch: Batch) -> None:
        out = self.model(**batch)
        loss = out.sum() if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def decided_seconds(self) -> float:
        return self.handle.stats().planning_seconds if self.handle else 0.0


def measure(before: Path, model: str, device: str, rounds: int) -> dict[str, Any]:
    here = Path(__file__).resolve().parent.parent / "src"
    make, batches = MODELS[model](device)
    versions = {"before": Library(before), "after": Library(here)}
    trainees = {"plain": Trainee(make, device, None)}
    trainees |= {way: Trainee(make, device, library) for way, library in versions.items()}
    for way, trainee in trainees.items():
        with versions[way].in_place() if way in versions else nullcontext():
            for number in range(WARM_UP):
                trainee.step(batches[-1 - number % len(batches)])
    gc.collect()
    gc.freeze()
    draw, took = random.Random(0), {way: [] for way in trainees}  # type: ignore[var-annotated]
    decided: dict[str, list[float]] = {way: [] for way in versions}
    for _ in range(rounds):
        batch = draw.choice(batches)
        for way in draw.sample(list(trainees), len(trainees)):
            trainee = trainees[way]
            decided_before = trainee.decided_seconds
            _wait(device)
            began = time.perf_counter()
            trainee.step(batch)
            _wait(device)
            took[way].append(time.perf_counter() - began)
            if way in decided:
                decided[way].append(trainee.decided_seconds - decided_before)
    pairs = {way: zip(took[way], took["plain"], strict=True) for way in decided}
    added = {way: [a - b for a, b in both] for way, both in pairs.items()}
    return {
        "plain_seconds": spread(took["plain"]),
        "added_seconds": {way: spread(times) for way, times in added.items()},
        "deciding_seconds": {way: spread(times) for way, times in decided.items()},
        "after_less_before_seconds": spread(
            [a - b for a, b in zip(took["after"], took["before"], strict=True)]
        ),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other mimose's `src`")
    parser.add_argument("--before-commit", default="", help="its commit, for the record")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    options = parser.parse_args()
    device = settle_device(None)
    results: dict[str, Any] = {
        "benchmark": "before_after",
        **circumstances(options.allow_dirty),
        "before_commit": options.before_commit,
        "rounds": options.rounds,
        "models": {},
    }
    for model in options.models:
        found = measure(options.before, model, device, options.rounds)
        results["models"][model] = found
        save(results, options.out)
        for name in ("added_seconds", "deciding_seconds"):
            figures = {way: round(1e6 * one["median"], 1) for way, one in found[name].items()}
            print(model, name, figures, "µs", flush=True)
        print(model, "after less before", found["after_less_before_seconds"], flush=True)


if __name__ == "__main__":
    main()
