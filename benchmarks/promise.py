"""Does the budget hold? Thousands of steps under a hard cap, surprises included.

    python benchmarks/promise.py --out results.json

Every run trains through `handle.retry` with `enforce=True` and counts what went wrong: steps lost,
steps or blocks run again, plans corrected while they ran, and the most that the allocator held.

- The tasks of `tasks.py` on real lengths, at the budgets that plain training exceeds on half of
  the steps (as `planner_quality.py` found them; TC-Bert on a tenth, or its longest do not fit).
- `rows`: later blocks see a random share of the tokens, so the size does not tell the memory.
- `detector`: torchvision's Faster R-CNN on COCO's image sizes, as in `mimose bench`.
- `regimes`: BERT-base, its lower half unfrozen at a third of the run, autocast from two thirds on.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mimose
from common import circumstances, parser_of, save
from mimose.bench.circumstances import settle_device
from mimose.bench.workloads import TASKS as WORKLOADS
from mimose.memory import meter_for
from tasks import TASKS

GIB = 1 << 30
DETECTOR = WORKLOADS["Faster-RCNN"]


@dataclass(frozen=True)
class Case:
    """A model, the steps that it is trained on, and its budget."""

    make: Callable[[], nn.Module]
    losses: Callable[[nn.Module, int], Iterator[Callable[[], torch.Tensor]]]
    """From the model and the number of steps: for each, what computes its loss."""
    budget: int | Callable[[Case], int]
    options: dict[str, Any]


def task_case(name: str, gib: float) -> Case:
    task = TASKS[name]

    def losses(model: nn.Module, steps: int) -> Iterator[Callable[[], torch.Tensor]]:
        for length in task.padded_lengths(steps, seed=1):
            batch = task.batch(length, "cuda")
            yield lambda batch=batch: model(**batch).loss  # type: ignore[misc]

    return Case(lambda: task.make().to("cuda", task.dtype), losses, int(gib * GIB), {})


class Rows(nn.Module):
    """Six blocks on all tokens, then six on those that a router has chosen: any share of them."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.all_tokens = nn.ModuleList(Mlp(width) for _ in range(6))
        self.chosen = nn.ModuleList(Mlp(width) for _ in range(6))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor, draw: random.Random) -> torch.Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        for block in self.all_tokens:
            hidden = block(hidden)
        hidden = hidden[: int(len(hidden) * draw.uniform(0.1, 1.0))]
        for block in self.chosen:
            hidden = block(hidden)
        answer: torch.Tensor = self.head(hidden.mean(0))
        return answer


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raised = nn.functional.gelu(self.up(self.norm(hidden)))
        out: torch.Tensor = hidden + nn.functional.dropout(self.down(raised), 0.1)
        return out


def rows_case() -> Case:
    def losses(model: nn.Module, steps: int) -> Iterator[Callable[[], torch.Tensor]]:
        draw = random.Random(0)
        for number in range(steps):
            tokens = torch.randint(0, 1000, (64, draw.randint(64, 512)), device="cuda")
            # The router's choice belongs to the step: a second attempt must see the same.
            yield lambda tokens=tokens, number=number: (  # type: ignore[misc]
                model(tokens, random.Random(number)).sum()
            )

    return Case(lambda: Rows().to("cuda"), losses, share_of_plain(0.6), {})


def detector_case() -> Case:
    task = DETECTOR

    def losses(model: nn.Module, steps: int) -> Iterator[Callable[[], torch.Tensor]]:
        for number, shape in enumerate(task.shapes(steps, scale=1, small=False)):
            batch = task.batch(shape, number, torch.device("cuda"))
            yield lambda batch=batch: task.loss(model(**batch))  # type: ignore[misc]

    assert task.input_size is not None
    return Case(
        lambda: task.make(False, task.attention).to("cuda"),
        losses,
        share_of_plain(0.7),
        {"input_size": task.input_size(False)},
    )


def regimes_case() -> Case:
    task = TASKS["TC-Bert"]

    def losses(model: nn.Module, steps: int) -> Iterator[Callable[[], torch.Tensor]]:
        lower = list(model.bert.encoder.layer[:6].parameters())  # type: ignore[union-attr,index,operator]
        for parameter in lower:
            parameter.requires_grad_(False)
        for number, length in enumerate(task.padded_lengths(steps, seed=2)):
            if number == steps // 3:
                for parameter in lower:
                    parameter.requires_grad_(True)
            batch = task.batch(length, "cuda")
            yield lambda batch=batch, late=number >= 2 * steps // 3: (  # type: ignore[misc]
                under_autocast(model, batch, late)
            )

    return Case(lambda: task.make().to("cuda"), losses, int(3.31 * GIB), {})


def under_autocast(model: nn.Module, batch: dict[str, Any], enabled: bool) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
        loss: torch.Tensor = model(**batch).loss
    return loss


def share_of_plain(share: float) -> Callable[[Case], int]:
    """A budget between what is in use at a step's start and what plain training needs at most."""

    def budget(case: Case) -> int:
        model = case.make().train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
        base = 0
        for number, loss_of in enumerate(case.losses(model, 24)):
            if number == 4:
                base = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            loss_of().backward()
            optimizer.step()
            optimizer.zero_grad()
        return int(base + share * (torch.cuda.max_memory_allocated() - base))

    return budget


def train(case: Case, steps: int, deadline: float) -> dict[str, Any]:
    torch.manual_seed(0)
    budget = case.budget(case) if callable(case.budget) else case.budget
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    meter = meter_for(torch.device("cuda"))
    before = meter.read()
    model = case.make().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    handle = mimose.auto_checkpoint(model, budget, enforce=True, **case.options)
    lost, held, began = [], 0, time.perf_counter()
    done = 0
    for number, loss_of in enumerate(case.losses(model, steps)):
        if time.perf_counter() > deadline:
            break
        done += 1
        try:
            handle.retry(lambda loss_of=loss_of: loss_of().backward())
            optimizer.step()
        except torch.OutOfMemoryError as error:
            lost.append([number, str(error)[:300]])
        optimizer.zero_grad()
        held = max(held, meter.read().peak_held)
    torch.cuda.synchronize()
    stats, after = handle.stats(), meter.read()
    held = max(held, stats.peak_held_bytes)  # an observed step resets the allocator's peaks
    handle.detach()
    return {
        "steps": done,
        "seconds": time.perf_counter() - began,
        "budget": budget,
        "lost": lost,
        "recoveries": stats.recoveries,
        "evictions": stats.evictions,
        "observed_steps": stats.observed_steps,
        "planned_steps": stats.planned_steps,
        "runs_recomputed": stats.runs_recomputed,
        "runs_kept": stats.runs_kept,
        "held_over_budget": held / budget,
        "reserve_share": (stats.reserve_bytes or 0) / budget,
        "allocator_retries": after.retries - before.retries,
    }


CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "regimes": (regimes_case, 1000),
    "rows": (rows_case, 120),
    "detector": (detector_case, 60),
    "QA-XLNet": (lambda: task_case("QA-XLNet", 7.12), 100),
    "SFT-Llama": (lambda: task_case("SFT-Llama", 9.65), 60),
    "QA-Bert": (lambda: task_case("QA-Bert", 4.62), 500),
    "MC-Roberta": (lambda: task_case("MC-Roberta", 3.59), 1000),
    "TC-Bert": (lambda: task_case("TC-Bert", 3.31), 2160),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--share", type=float, default=1.0, help="of each case's steps")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    options = parser.parse_args()
    settle_device("cuda")
    deadline = time.perf_counter() + options.time_limit
    results = {"benchmark": "promise", **circumstances(options.allow_dirty), "cases": {}}
    for name in options.cases:
        make, steps = CASES[name]
        results["cases"][name] = case = train(make(), max(20, int(steps * options.share)), deadline)
        print(name, case, flush=True)
        save(results, options.out)


if __name__ == "__main__":
    main()
