"""Several passes or several models in one step, under a budget; a part of `content.py`."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mimose
from content_cases import WORDS, Loss, fresh, words
from mimose.memory import Meter, meter_for
from mimose.training import StepRecord, StepStart, Subscriber


@dataclass(frozen=True)
class Loop:
    """Models that are trained together, and the losses of one step, one after the other."""

    models: Sequence[nn.Module]
    losses: Callable[[int], Iterator[tuple[int, Loss]]]
    """Of a step's number: whose optimizer comes after the backward, and what computes the loss."""


class Encoder(nn.Module):
    """Vectors of a sequence, or of words, to vectors."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.is_floating_point():
            hidden = self.embedding(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def encoder(device: str, layers: int = 8) -> Encoder:
    width, most = (32, 4) if device == "cpu" else (512, layers)
    return Encoder(width, min(layers, most)).to(device)


def drawn_words(device: str, number: int, shortest: int, longest: int) -> torch.Tensor:
    """Texts of a random length: of up to `longest` words on a GPU, of a tenth of that on a CPU."""
    count, scale = (4, 10) if device == "cpu" else (32, 1)
    length = random.Random(number).randint(shortest // scale, longest // scale)
    return words(number, WORDS, count, length, device)


def gan(device: str) -> Loop:
    """A generator below its discriminator, which first sees what is real and what is not."""
    made, judge = encoder(device), encoder(device)

    def judged(sequence: torch.Tensor, real: float) -> torch.Tensor:
        logits = judge(sequence).mean((1, 2))
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def losses(number: int) -> Iterator[tuple[int, Loss]]:
        tokens = drawn_words(device, number, 40, 400)
        noise = torch.randn(*tokens.shape, made.width, device=device)
        with torch.no_grad():
            false = made(noise)
        yield 1, lambda: judged(tokens, 1.0) + judged(false, 0.0)
        yield 0, lambda: judged(made(noise), 1.0)

    return Loop([made, judge], losses)


def contrastive(device: str) -> Loop:
    """Queries and documents through one encoder: two passes before one backward."""
    model = encoder(device, 12)

    def loss(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        own = torch.arange(len(queries), device=device)
        return F.cross_entropy(model(queries).mean(1) @ model(documents).mean(1).T, own)

    def losses(number: int) -> Iterator[tuple[int, Loss]]:
        queries = drawn_words(device, 2 * number, 20, 100)
        documents = drawn_words(device, 2 * number + 1, 60, 500)
        yield 0, lambda: loss(queries, documents)

    return Loop([model], losses)


def distillation(device: str) -> Loop:
    """A student that follows a larger teacher, which has no gradients and no handle."""
    teacher, student = encoder(device, 12), encoder(device)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(tokens)
        return F.mse_loss(student(tokens), wanted)

    def losses(number: int) -> Iterator[tuple[int, Loss]]:
        tokens = drawn_words(device, number, 40, 500)
        yield 0, lambda: loss(tokens)

    return Loop([student], losses)


LOOPS: dict[str, Callable[[str], Loop]] = {
    "GAN": gan,
    "contrastive": contrastive,
    "distillation": distillation,
}


class Shortfalls(Subscriber):
    """By what share of the real peak trusted predictions were too low."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.shares: list[float] = []

    def step_starts(self, step: StepStart) -> None:
        self.meter.reset_peak()

    def step_over(self, record: StepRecord) -> None:
        peak, predicted = self.meter.read().peak, record.predicted_peak_bytes
        if record.comparable and predicted is not None and not record.observed:
            self.shares.append((peak - predicted) / peak)


def loop_peaks(loop: Loop, device: str, steps: int) -> Iterator[int | None]:
    """The peak of each step; None if memory ran out."""
    meter, fused = meter_for(torch.device(device)), device == "cuda" or None
    optimizers = [torch.optim.AdamW(m.train().parameters(), 1e-5, fused=fused) for m in loop.models]
    for number in range(steps):
        torch.manual_seed(number)
        meter.reset_peak()
        try:
            for which, loss in loop.losses(number):
                loss().backward()
                optimizers[which].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            yield meter.read().peak
        except torch.OutOfMemoryError:
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield None
    meter.close()


def attached_peaks(
    loop: Loop, device: str, steps: int, budget: int | str, **options: Any
) -> tuple[list[int | None], dict[str, Any]]:
    """The same with a handle on each model, and what the handles tell."""
    handles = [mimose.auto_checkpoint(model, budget, **options) for model in loop.models]
    shortfalls = [Shortfalls(meter_for(torch.device(device))) for _ in handles]
    for handle, shortfall in zip(handles, shortfalls, strict=True):
        handle.subscribe(shortfall)
    peaks = list(loop_peaks(loop, device, steps))
    stats = [handle.stats() for handle in handles]
    for handle, shortfall in zip(handles, shortfalls, strict=True):
        handle.detach()
        shortfall.meter.close()
    shares = [share for each in shortfalls for share in each.shares]
    return peaks, {
        "lost": [number for number, peak in enumerate(peaks) if peak is None],
        "compared": len(shares),
        "worst_under": max([0.0, *shares]),
        "mean_over": statistics.fmean([max(0.0, -share) for share in shares] or [0.0]),
        "evictions": sum(each.evictions for each in stats),
        "recoveries": sum(each.recoveries for each in stats),
        "observed_steps": sum(each.observed_steps for each in stats),
        "planned_steps": sum(each.planned_steps for each in stats),
        "held_over_budget": max(each.peak_held_bytes for each in stats),
    }


def passes(name: str, device: str, steps: int) -> dict[str, Any]:
    make = functools.partial(LOOPS[name], device)
    plain = [peak for peak in loop_peaks(fresh(make, device), device, steps) if peak is not None]
    loop = fresh(make, device)
    least, _ = attached_peaks(loop, device, steps, "100%", planner="recompute_all")
    needed = max(peak or 0 for peak in least[2:])  # blocks are tried in the first step
    budget = max(int(statistics.median(plain)), int(1.05 * needed))
    del loop
    peaks, run = attached_peaks(fresh(make, device), device, steps, budget, enforce=True)
    run["held_over_budget"] /= budget
    exceeded = sum(peak > budget for peak in plain) / len(plain)
    print(name, f"{budget / 2**30:.3f} GiB, exceeded on {exceeded:.0%}", run, flush=True)
    return {"steps": steps, "budget": budget, "plain_exceeds": exceeded, **run, "peaks": peaks}
