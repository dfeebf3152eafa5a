"""A one-minute demo: `python -m mimose.cli.demo`, or `mimose demo` for live progress.

Trains a small encoder on batches of varying length in four ways: without checkpointing, with every
block recomputed, with one static plan for the longest batch, and with mimose under the same budget.
Uses a CUDA device if there is one, else the CPU. Prints the time and peak of each way, and writes a
recording and a report of the mimose run.
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
from mimose.cli.demo_model import Encoder, Shape, step
from mimose.errors import ArgumentError
from mimose.memory import configure_for_process, meter_for
from mimose.reporting import refuse_file
from mimose.units import text_of

STEPS = 40
WARM_UP = 3
ROUNDS = 2


SMALL = Shape(width=128, layers=6, batch=8, longest=256)
LARGE = Shape(width=768, layers=12, batch=32, longest=384)


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
    """One letter per block: K kept, r recomputed."""
    peak_bytes: int
    budget_bytes: int | None


Progress = Callable[[Moment], None]


class Quiet:
    """Prints one line per training run, if the output is not a terminal."""

    def __init__(self) -> None:
        self._printed: tuple[int, str] | None = None

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, moment: Moment) -> None:
        if self._printed != (moment.round, moment.way):
            self._printed = (moment.round, moment.way)
            print(f"round {moment.round} of {moment.rounds}: {moment.way}", file=sys.stderr)


@dataclass(frozen=True)
class Result:
    """One training run."""

    step_seconds: tuple[float, ...]
    peak_bytes: int
    """Peak of the timed steps."""
    first_peak_bytes: int
    """Peak of the steps before them, in which mimose tries blocks and observes."""
    losses: tuple[float, ...]
    handle: Mimose | None

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)


def lengths(shape: Shape) -> list[int]:
    """Padded lengths distributed as in text: many short, few long."""
    draw = random.Random(0)
    return [min(shape.longest, int(24 + draw.expovariate(5 / shape.longest))) for _ in range(STEPS)]


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


def train(shape: Shape, device: torch.device, way: Way, watch: Callable[..., None]) -> Result:
    """Train from the same initial weights on the same batches.

    The first steps are not timed. They warm up on the longest batch, which the static plan is for.
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
        watch(number + 1, length, _letters(shape, handle), highest)
    if handle is not None:
        handle.detach()
    meter.close()
    return Result(tuple(seconds), peak, first_peak, tuple(losses), handle)


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


PLAIN, EVERYTHING, STATIC, OURS = "plain", "everything recomputed", "static plan", "mimose"


def compare(progress: Progress, record: Path | None = None) -> Outcome:
    """Train four ways in turns, so that no way benefits from a warmer machine."""
    device = the_device()
    shape = LARGE if device.type == "cuda" else SMALL
    rounds: dict[str, list[Result]] = {}
    budget: int | None = None

    def run(number: int, way: Way) -> None:
        def watch(step: int, length: int, plan: str, peak: int) -> None:
            where = (number, ROUNDS, way.name, step, STEPS + 1)
            progress(Moment(*where, length, plan, peak, budget))

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
    configure_for_process()  # the same allocator settings for all four ways
    return torch.device("cuda", 0)


def print_outcome(outcome: Outcome) -> None:
    """Print the comparison, the statistics of mimose, and the plan of the longest batch."""
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
    print("\nThe plan for the longest batch:\n")
    shape = outcome.shape
    print(handle.explain(torch.zeros(shape.batch, shape.longest, dtype=torch.long)))


def first_steps(outcome: Outcome) -> list[str]:
    """A line for each way whose untimed first steps had a higher peak than the timed ones."""
    return [
        f"{name}: {text_of(result.first_peak_bytes)} in the untimed first steps, in which blocks "
        "are tried\n"
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
    """Raise if the page or its recording cannot be written; called before training."""
    if path.suffix == ".jsonl":
        raise ArgumentError(
            f"--output {path}: the page must end in .html; the recording is written to .jsonl"
        )
    refuse_file(path, "--output", like="demo.html")
    refuse_file(path.with_suffix(".jsonl"), "the recording", like="demo.jsonl")


def write_page(path: Path, outcome: Outcome) -> Path:
    """Write the report on the mimose run."""
    from mimose.reporting import contents_of, page_of, read_recording

    handle = outcome.results[OURS].handle
    assert handle is not None
    assert handle.recording is not None
    contents = contents_of(read_recording(handle.recording))
    path.write_text(page_of(contents, "mimose: demo"), encoding="utf-8")
    return path.resolve()


def main() -> int:
    """Run the demo without typer and rich."""
    page = Path("mimose-demo.html")
    try:
        refuse_page(page)
    except ArgumentError as error:
        print(f"python -m mimose.cli.demo: {error}", file=sys.stderr)
        return 2
    device = the_device()
    shape = LARGE if device.type == "cuda" else SMALL
    print(
        f"Training an encoder of {shape.layers} blocks on {device}, four ways, {STEPS + 1} steps "
        f"each: batches of {shape.batch} texts, padded to 24–{shape.longest} tokens.\n"
    )
    try:
        outcome = compare(Quiet(), page.with_suffix(".jsonl"))
        print_outcome(outcome)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"\nReport on the mimose run: {write_page(page, outcome)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
