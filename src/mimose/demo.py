"""A minute with mimose: `python -m mimose.demo`.

Trains a small encoder on batches of varying length four times: without checkpointing, with every
block recomputed, with one plan for the longest batch (what a static tool does), and with mimose
under the same budget. Uses a CUDA device if there is one, the CPU otherwise.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from mimose.budget import text_of
from mimose.memory import meter_for
from mimose.session import Mimose, auto_checkpoint

STEPS = 40
WARM_UP = 3
ROUNDS = 2


@dataclass(frozen=True)
class Shape:
    """How large the demo is."""

    width: int
    layers: int
    batch: int
    longest: int


SMALL = Shape(width=128, layers=6, batch=8, longest=256)
LARGE = Shape(width=768, layers=12, batch=32, longest=384)


class Encoder(nn.Module):
    """Reads tokens, tells which of two classes they are."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        answer: torch.Tensor = self.head(hidden.mean(1))
        return answer


class Block(nn.Module):
    """Attention, then two linear layers; the scores of all heads are kept for the backward."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_all, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attend(self.norm_in(hidden)))
        raised = nn.functional.gelu(self.up(self.norm_out(hidden)))
        out: torch.Tensor = hidden + self.dropout(self.down(raised))
        return out

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.to_all(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = self.dropout(scores.softmax(-1)) @ value
        out: torch.Tensor = self.from_heads(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


@dataclass(frozen=True)
class Result:
    """One training run."""

    step_seconds: tuple[float, ...]
    peak_bytes: int
    losses: tuple[float, ...]
    handle: Mimose | None

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)


def lengths(shape: Shape) -> list[int]:
    """Padded lengths as text gives them: many short, few long."""
    draw = random.Random(0)
    return [min(shape.longest, int(24 + draw.expovariate(5 / shape.longest))) for _ in range(STEPS)]


def best_of(rounds: list[Result]) -> Result:
    """Each step's best time: other programs run on this machine, too."""
    times = zip(*(run.step_seconds for run in rounds), strict=True)
    return replace(rounds[-1], step_seconds=tuple(min(of_step) for of_step in times))


def train(shape: Shape, device: torch.device, budget: str | int | None, planner: str) -> Result:
    """Train from the same start on the same batches; without a budget, as if mimose did not exist.

    The first steps, on the longest batch, are not timed: they warm up, and tell a static planner
    what it must be prepared for.
    """
    gc.collect()
    torch.manual_seed(0)
    meter = meter_for(device)
    model = Encoder(shape).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    handle = None if budget is None else auto_checkpoint(model, budget, planner=planner)
    for _ in range(WARM_UP):
        step(model, optimizer, shape, shape.longest, device)
    peak, losses, seconds = 0, [], []
    for number, length in enumerate([shape.longest, *lengths(shape)]):
        torch.manual_seed(number)
        meter.reset_peak()
        began = time.perf_counter()
        losses.append(step(model, optimizer, shape, length, device))
        seconds.append(time.perf_counter() - began)
        peak = max(peak, meter.read().peak, handle.stats().peak_bytes if handle else 0)
    if handle is not None:
        handle.detach()
    meter.close()
    return Result(tuple(seconds), peak, tuple(losses), handle)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: Shape,
    length: int,
    device: torch.device,
) -> float:
    """One step of a training loop that knows nothing of mimose."""
    tokens = torch.randint(0, 1000, (shape.batch, length), device=device)
    labels = torch.randint(0, 2, (shape.batch,), device=device)
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def row(name: str, result: Result, plain: Result, budget: int) -> str:
    """One line of the table."""
    stats = result.handle.stats() if result.handle else None
    runs = stats.runs_kept + stats.runs_recomputed if stats else 0
    share = f"{stats.runs_recomputed / runs:.0%}" if stats and runs else "–"
    verdict = "over the budget" if result.peak_bytes > budget else "fits"
    return (
        f"{name:22}{result.seconds / (STEPS + 1) * 1e3:10.1f}{result.seconds / plain.seconds:9.2f}"
        f"{text_of(result.peak_bytes):>13}   {verdict:16}{share:>10}"
    )


def main() -> None:
    """Train four times, then compare."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape = LARGE if device.type == "cuda" else SMALL
    print(
        f"An encoder of {shape.layers} blocks, {shape.batch} texts a batch, padded to 24–"
        f"{shape.longest} tokens, on {device}: {STEPS + 1} steps each.\n"
    )
    ways: dict[str, list[Result]] = {name: [] for name in ("plain", "everything", "static", "ours")}
    for _ in range(ROUNDS):  # in turns, so that nobody profits from a warmer machine
        ways["plain"].append(train(shape, device, None, "keep_all"))
        ways["everything"].append(train(shape, device, "100%", "recompute_all"))
        budget = (ways["plain"][0].peak_bytes + ways["everything"][0].peak_bytes) // 2
        ways["static"].append(train(shape, device, budget, "static"))
        ways["ours"].append(train(shape, device, budget, "optimal"))
    plain, everything, static, ours = (best_of(rounds) for rounds in ways.values())
    print(f"{'':22}{'ms a step':>10}{'× plain':>9}{'peak':>13}   {'budget ' + text_of(budget):16}"
          f"{'recomputed':>11}")  # fmt: skip
    print(row("plain", plain, plain, budget))
    print(row("everything recomputed", everything, plain, budget))
    print(row("static plan", static, plain, budget))
    print(row("mimose", ours, plain, budget))
    same = all(run.losses == plain.losses for run in (everything, static, ours))
    print(f"\nThe losses of all four are {'identical, bit for bit' if same else 'NOT identical'}.")
    assert ours.handle is not None
    print(f"\n{ours.handle.stats()}")
    print("\nThe longest batch, explained:\n")
    tokens = torch.zeros(shape.batch, shape.longest, dtype=torch.long)
    print(ours.handle.explain(tokens))


if __name__ == "__main__":
    main()
