"""What the demo measures: a small encoder trained four ways under one budget."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mimose.api import Mimose, auto_checkpoint
from mimose.cli.demo_model import Encoder, Shape, step
from mimose.memory import configure_for_process, meter_for

STEPS = 40
WARM_UP = 3
ROUNDS = 2
SMALL = Shape(width=128, layers=6, batch=8, longest=256)
LARGE = Shape(width=768, layers=12, batch=32, longest=384)
PLAIN, EVERYTHING, STATIC, OURS = "plain", "everything recomputed", "static plan", "mimose"


@dataclass(frozen=True)
class DemoStep:
    """One step of the demo, for live output."""

    round: int
    rounds: int
    way: str
    step: int
    steps: int
    length: int
    plan: str
    """One letter per block: K kept, r recomputed."""
    peak_bytes: int
    budget_bytes: int | None


Progress = Callable[[DemoStep], None]


class QuietProgress:
    """Prints one line per training run: for output that is not a terminal."""

    def __init__(self) -> None:
        self._printed: tuple[int, str] | None = None

    def __enter__(self) -> QuietProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, done: DemoStep) -> None:
        if self._printed != (done.round, done.way):
            self._printed = (done.round, done.way)
            print(f"round {done.round} of {done.rounds}: {done.way}", file=sys.stderr)


@dataclass(frozen=True)
class Result:
    """One training run."""

    step_seconds: tuple[float, ...]
    peak_bytes: int
    """Peak of the timed steps."""
    first_peak_bytes: int
    """Peak of the untimed steps before them, in which mimose tests blocks and observes."""
    losses: tuple[float, ...]
    handle: Mimose | None
    explanation: str = ""
    """How mimose runs the longest batch, while it is attached."""

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)


def lengths(shape: Shape) -> list[int]:
    """Padded lengths distributed as in text: many short, few long."""
    generator = random.Random(0)
    drawn = (24 + generator.expovariate(5 / shape.longest) for _ in range(STEPS))
    return [min(shape.longest, int(length)) for length in drawn]


def best_of(rounds: list[Result]) -> Result:
    """The best time of each step, since other programs may disturb a round."""
    times = zip(*(run.step_seconds for run in rounds), strict=True)
    return replace(rounds[-1], step_seconds=tuple(min(of_step) for of_step in times))


@dataclass(frozen=True)
class Way:
    """One way to train; without a budget, mimose is not attached."""

    name: str
    planner: str = "keep_all"
    budget: str | int | None = None
    record: Path | None = None

    def attach(self, model: nn.Module) -> Mimose | None:
        if self.budget is None:
            return None
        return auto_checkpoint(model, self.budget, planner=self.planner, record=self.record)


def train(shape: Shape, device: torch.device, way: Way, report_step: Callable[..., None]) -> Result:
    """Train from the same initial weights on the same batches.

    The first steps warm up on the longest batch and are not timed; the static plan is made for it.
    """
    gc.collect()
    torch.manual_seed(0)
    meter = meter_for(device)
    meter.release_cached()
    model = Encoder(shape).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    handle = way.attach(model)
    for _ in range(WARM_UP):
        step(model, optimizer, shape, shape.longest, device)
    first_peak = handle.stats().peak_bytes if handle else 0
    peak, losses, seconds = 0, [], []
    for number, length in enumerate([shape.longest, *lengths(shape)]):
        torch.manual_seed(number)
        meter.reset_peak()
        began = time.perf_counter()
        losses.append(step(model, optimizer, shape, length, device))
        seconds.append(time.perf_counter() - began)
        highest = max(meter.read().peak, _last_peak(handle))
        peak = max(peak, highest)
        report_step(number + 1, length, _letters(shape, handle), highest)
    explanation = ""
    if handle is not None:
        tokens = torch.zeros(shape.batch, shape.longest, dtype=torch.long)
        explanation = str(handle.explain(tokens))
        handle.detach()
    meter.close()
    return Result(tuple(seconds), peak, first_peak, tuple(losses), handle, explanation)


def _last_peak(handle: Mimose | None) -> int:
    """The peak of the last step as measured by mimose; 0 if it was not measured."""
    return (handle.stats().last_real_peak_bytes or 0) if handle else 0


def _letters(shape: Shape, handle: Mimose | None) -> str:
    if handle is None:
        return "K" * shape.layers
    stats = handle.stats()
    return str(stats.last_plan) if stats.last_plan else "r" * shape.layers


@dataclass(frozen=True)
class Outcome:
    """The results of all four ways."""

    shape: Shape
    budget_bytes: int
    results: dict[str, Result]

    @property
    def identical(self) -> bool:
        """Whether every way gave the same losses, bit for bit."""
        return len({result.losses for result in self.results.values()}) == 1

    def to_plain(self) -> dict[str, Any]:
        """Values for JSON."""
        ways = {
            name: {
                "seconds": result.seconds,
                "peak_bytes": result.peak_bytes,
                "first_peak_bytes": result.first_peak_bytes,
            }
            for name, result in self.results.items()
        }
        return {"budget_bytes": self.budget_bytes, "identical": self.identical, "ways": ways}


def compare(progress: Progress, record: Path | None = None) -> Outcome:
    """Train four ways in turns, so that no way benefits from a machine that has warmed up."""
    device = demo_device()
    shape = demo_shape(device)
    rounds: dict[str, list[Result]] = {}
    budget: int | None = None

    def run(number: int, way: Way) -> None:
        def report_step(step: int, length: int, plan: str, peak: int) -> None:
            where = (number, ROUNDS, way.name, step, STEPS + 1)
            progress(DemoStep(*where, length, plan, peak, budget))

        rounds.setdefault(way.name, []).append(train(shape, device, way, report_step))

    for number in range(1, ROUNDS + 1):
        run(number, Way(PLAIN))
        run(number, Way(EVERYTHING, "recompute_all", "100%"))
        budget = (rounds[PLAIN][0].peak_bytes + rounds[EVERYTHING][0].peak_bytes) // 2
        run(number, Way(STATIC, "static", budget))
        run(number, Way(OURS, "optimal", budget, record if number == ROUNDS else None))
    assert budget is not None
    return Outcome(shape, budget, {name: best_of(results) for name, results in rounds.items()})


def demo_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    configure_for_process()  # the same allocator settings for all four ways
    return torch.device("cuda", 0)


def demo_shape(device: torch.device) -> Shape:
    return LARGE if device.type == "cuda" else SMALL
