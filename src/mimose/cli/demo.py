"""A minute with mimose: `python -m mimose.cli.demo`.

Trains a small encoder on batches of varying length four times: without checkpointing, with every
block recomputed, with one plan for the longest batch (what a static tool does), and with mimose
under the same budget. Uses a CUDA device if there is one, the CPU otherwise. At the end it tells
what each way cost, and leaves a recording and a page about mimose's own run.

`mimose demo` is the same with live progress.
"""

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
from mimose.errors import ArgumentError
from mimose.memory import meter_for, set_up_for_good
from mimose.reporting import refuse_file
from mimose.units import text_of

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
class Moment:
    """One step of the demo, for live output."""

    round: int
    rounds: int
    way: str
    step: int
    steps: int
    length: int
    plan: str
    """A letter a block: K kept, r recomputed."""
    peak_bytes: int
    budget_bytes: int | None


Watcher = Callable[[Moment], None]


class Quiet:
    """Tells each way once, for a terminal that is none."""

    def __init__(self) -> None:
        self._told: tuple[int, str] | None = None

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, moment: Moment) -> None:
        if self._told != (moment.round, moment.way):
            self._told = (moment.round, moment.way)
            print(f"round {moment.round} of {moment.rounds}: {moment.way}", file=sys.stderr)


@dataclass(frozen=True)
class Result:
    """One training run."""

    step_seconds: tuple[float, ...]
    peak_bytes: int
    """Of the timed steps."""
    first_peak_bytes: int
    """Of those before them, in which mimose tries blocks and observes."""
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


@dataclass(frozen=True)
class Way:
    """One way to train: without a budget, as if mimose did not exist."""

    name: str
    planner: str = "keep_all"
    budget: str | int | None = None
    record: Path | None = None

    def attach(self, model: nn.Module) -> Mimose | None:
        if self.budget is None:
            return None
        return auto_checkpoint(model, self.budget, planner=self.planner, record=self.record)


def train(shape: Shape, device: torch.device, way: Way, watch: Callable[..., None]) -> Result:
    """Train from the same start on the same batches.

    The first steps, on the longest batch, are not timed: they warm up, and tell a static planner
    what it must be prepared for.
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
        highest = max(meter.read().peak, _seen_by(handle))
        peak = max(peak, highest)
        watch(number + 1, length, _letters(shape, handle), highest)
    if handle is not None:
        handle.detach()
    meter.close()
    return Result(tuple(seconds), peak, first_peak, tuple(losses), handle)


def _seen_by(handle: Mimose | None) -> int:
    """The peak of the step that has just been, as far as mimose could see it."""
    return (handle.stats().last_real_peak_bytes or 0) if handle else 0


def _letters(shape: Shape, handle: Mimose | None) -> str:
    if handle is None:
        return "K" * shape.layers
    stats = handle.stats()
    return str(stats.last_plan) if stats.last_plan else "r" * shape.layers


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


@dataclass(frozen=True)
class Outcome:
    """All four ways, side by side."""

    shape: Shape
    budget_bytes: int
    results: dict[str, Result]

    @property
    def identical(self) -> bool:
        """Whether every way gave the same losses, bit for bit."""
        return len({result.losses for result in self.results.values()}) == 1

    def to_plain(self) -> dict[str, Any]:
        """For machines."""
        ways = {
            name: {
                "seconds": result.seconds,
                "peak_bytes": result.peak_bytes,
                "first_peak_bytes": result.first_peak_bytes,
            }
            for name, result in self.results.items()
        }
        return {"budget_bytes": self.budget_bytes, "identical": self.identical, "ways": ways}


PLAIN, EVERYTHING, STATIC, OURS = "plain", "everything recomputed", "static plan", "mimose"


def compare(watcher: Watcher, record: Path | None = None) -> Outcome:
    """Train four ways, in turns, so that nobody profits from a warmer machine."""
    device = the_device()
    shape = LARGE if device.type == "cuda" else SMALL
    rounds: dict[str, list[Result]] = {}
    budget: int | None = None

    def run(number: int, way: Way) -> None:
        def watch(step: int, length: int, plan: str, peak: int) -> None:
            where = (number, ROUNDS, way.name, step, STEPS + 1)
            watcher(Moment(*where, length, plan, peak, budget))

        rounds.setdefault(way.name, []).append(train(shape, device, way, watch))

    for number in range(1, ROUNDS + 1):
        run(number, Way(PLAIN))
        run(number, Way(EVERYTHING, "recompute_all", "100%"))
        budget = (rounds[PLAIN][0].peak_bytes + rounds[EVERYTHING][0].peak_bytes) // 2
        run(number, Way(STATIC, "static", budget))
        run(number, Way(OURS, "optimal", budget, record if number == ROUNDS else None))
    assert budget is not None
    return Outcome(shape, budget, {name: best_of(results) for name, results in rounds.items()})


def the_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    set_up_for_good()  # for all four ways
    return torch.device("cuda", 0)


def tell(outcome: Outcome) -> None:
    """Print the comparison, what mimose did, and why the longest batch got its plan."""
    budget, plain = outcome.budget_bytes, outcome.results[PLAIN]
    print(f"{'':22}{'ms a step':>10}{'× plain':>9}{'peak':>13}   {'budget ' + text_of(budget):16}"
          f"{'recomputed':>11}")  # fmt: skip
    for name, result in outcome.results.items():
        print(row(name, result, plain, budget))
    print("".join(first_steps(outcome)), end="")
    same = "identical, bit for bit" if outcome.identical else "NOT identical"
    print(f"\nThe losses of all four are {same}.")
    handle = outcome.results[OURS].handle
    assert handle is not None
    print(f"\n{handle.stats()}")
    print("\nThe longest batch, explained:\n")
    shape = outcome.shape
    print(handle.explain(torch.zeros(shape.batch, shape.longest, dtype=torch.long)))


def first_steps(outcome: Outcome) -> list[str]:
    """What took more before the timed steps than in them."""
    return [
        f"{name}: {text_of(result.first_peak_bytes)} in the first steps, not timed: blocks are "
        "tried there\n"
        for name, result in outcome.results.items()
        if result.first_peak_bytes > result.peak_bytes
    ]


def row(name: str, result: Result, plain: Result, budget: int) -> str:
    """One line of the table."""
    stats = result.handle.stats() if result.handle else None
    runs = stats.runs_kept + stats.runs_recomputed if stats else 0
    share = f"{stats.runs_recomputed / runs:.0%}" if stats and runs else "–"
    highest = max(result.peak_bytes, result.first_peak_bytes)
    verdict = "over the budget" if highest > budget else "fits"
    return (
        f"{name:22}{result.seconds / (STEPS + 1) * 1e3:10.1f}{result.seconds / plain.seconds:9.2f}"
        f"{text_of(result.peak_bytes):>13}   {verdict:16}{share:>10}"
    )


def refuse_page(path: Path) -> None:
    """Refuse a page that could not be written beside its recording, before a minute of training."""
    if path.suffix == ".jsonl":
        raise ArgumentError(f"--output {path}: this is where the recording goes; the page is .html")
    refuse_file(path, "--output", like="demo.html")
    refuse_file(path.with_suffix(".jsonl"), "the recording", like="demo.jsonl")


def write_page(path: Path, outcome: Outcome) -> Path:
    """The page about mimose's own run."""
    from mimose.reporting import contents_of, page_of, read_recording

    handle = outcome.results[OURS].handle
    assert handle is not None
    assert handle.recording is not None
    contents = contents_of(read_recording(handle.recording))
    path.write_text(page_of(contents, "mimose: demo"), encoding="utf-8")
    return path.resolve()


def main() -> int:
    """Train four times, then compare."""
    page = Path("mimose-demo.html")
    try:
        refuse_page(page)
    except ArgumentError as error:
        print(f"python -m mimose.cli.demo: {error}", file=sys.stderr)
        return 2
    device = the_device()
    shape = LARGE if device.type == "cuda" else SMALL
    print(
        f"An encoder of {shape.layers} blocks, {shape.batch} texts a batch, padded to 24–"
        f"{shape.longest} tokens, on {device}: {STEPS + 1} steps each.\n"
    )
    try:
        outcome = compare(Quiet(), page.with_suffix(".jsonl"))
        tell(outcome)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"\nIts report: {write_page(page, outcome)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
