"""The runs of `promise.py`: models, what they are trained on, and what happens in mid-run.

- The tasks of `tasks.py` on real lengths.
- `rows`: later blocks see a random share of the tokens, so the size does not tell the memory.
- `experts`: Mixtral's layers, each token through two of its experts.
- `detector`: torchvision's Faster R-CNN on COCO's image sizes, as in `mimose bench`.
- `contrastive`: queries and documents through one encoder, two passes before each backward.
- `outliers`: short texts, and after every 500 of them a batch that is ten times as long.
- `regimes`: the lower half unfrozen at a third of the run, autocast from two thirds on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mimose.bench.workloads import TASKS as WORKLOADS
from tasks import TASKS

Loss = Callable[[], torch.Tensor]
OUTLIER_EVERY = 500


@dataclass(frozen=True)
class Where:
    """The device, and whether models are small."""

    device: str
    small: bool


@dataclass(frozen=True)
class Case:
    """A model, and the steps that it is trained on."""

    make: Callable[[Where], nn.Module]
    losses: Callable[[nn.Module, Where, int, int], Iterator[Loss]]
    """From the model, the number of steps and a seed: for each step, what computes its loss."""
    steps: int
    """In all, over as many runs as it takes."""
    run_steps: int = 500
    """Of one run."""
    hardest: Callable[[nn.Module, Where], Loss] | None = None
    """A step that every budget has to leave room for, if the first steps do not show it."""
    options: Callable[[Where], dict[str, Any]] = field(default=lambda where: {})
    needs: tuple[str, ...] = ()
    """Packages that may be missing."""


def text_case(name: str, steps: int, run_steps: int = 500) -> Case:
    def task(where: Where) -> Any:
        return replace(TASKS[name], small=where.small)

    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        for length in task(where).padded_lengths(steps, seed=seed):
            yield loss_of(model, task(where).batch(length, where.device))

    def make(where: Where) -> nn.Module:
        model: nn.Module = task(where).make()
        return model.to(where.device, task(where).dtype)

    return Case(make, losses, steps, run_steps)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Loss:
    return lambda: model(**batch).loss


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raised = F.gelu(self.up(self.norm(hidden)))
        out: torch.Tensor = hidden + F.dropout(self.down(raised), 0.1)
        return out


class Rows(nn.Module):
    """Six blocks on all tokens, then six on those that a router has chosen: any share of them."""

    def __init__(self, width: int) -> None:
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


def rows_case() -> Case:
    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        draw, rows, longest = random.Random(seed), *((4, 48) if where.small else (64, 512))
        for number in range(steps):
            length = draw.randint(longest // 8, longest)
            tokens = torch.randint(0, 1000, (rows, length), device=where.device)
            # The router's choice belongs to the step: a second attempt must see the same.
            yield lambda tokens=tokens, number=number: (  # type: ignore[misc]
                model(tokens, random.Random(number)).sum()
            )

    return Case(lambda where: Rows(32 if where.small else 768).to(where.device), losses, steps=1500)


def experts(where: Where) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    width = 64 if where.small else 768
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4 if where.small else 12,
        num_attention_heads=4 if where.small else 12,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    return MixtralForCausalLM(config).to(where.device)


def experts_case() -> Case:
    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        draw, rows, longest = random.Random(seed), *((2, 48) if where.small else (8, 512))
        for _ in range(steps):
            shape = (rows, draw.randint(longest // 8, longest))
            tokens = torch.randint(5, 1000, shape, device=where.device)
            yield loss_of(model, {"input_ids": tokens, "labels": tokens})

    return Case(experts, losses, steps=1000, run_steps=250)


def detector_case() -> Case:
    task = WORKLOADS["Faster-RCNN"]

    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        for number, shape in enumerate(task.shapes(steps, scale=1, small=where.small, seed=seed)):
            batch = task.batch(shape, number, torch.device(where.device))
            yield lambda batch=batch: task.loss(model(**batch))  # type: ignore[misc]

    assert task.input_size is not None
    size = task.input_size
    return Case(
        lambda where: task.make(where.small, task.attention).to(where.device),
        losses,
        steps=500,
        run_steps=120,
        options=lambda where: {"input_size": size(where.small)},
        needs=task.needs,
    )


def bert(where: Where) -> nn.Module:
    model: nn.Module = replace(TASKS["TC-Bert"], small=where.small).make()
    return model.to(where.device)


def words(where: Where, rows: int, length: int) -> torch.Tensor:
    return torch.randint(5, 1000, (rows, length), device=where.device)


def contrastive_case() -> Case:
    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        draw, rows, longest = random.Random(seed), *((4, 40) if where.small else (24, 256))
        for _ in range(steps):
            queries = words(where, rows, draw.randint(8, longest // 4))
            documents = words(where, rows, draw.randint(longest // 4, longest))
            yield lambda queries=queries, documents=documents: (  # type: ignore[misc]
                contrast(model(queries).logits, model(documents).logits)
            )

    def contrast(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        own = torch.arange(len(queries), device=queries.device)
        return F.cross_entropy(queries @ documents.T, own)

    return Case(bert, losses, steps=3000)


def outliers_case() -> Case:
    def step(model: nn.Module, where: Where, rows: int, length: int) -> Loss:
        labels = torch.randint(0, 2, (rows,), device=where.device)
        return loss_of(model, {"input_ids": words(where, rows, length), "labels": labels})

    def size(where: Where) -> tuple[int, int]:
        return (4, 6) if where.small else (16, 44)

    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        draw, (rows, longest) = random.Random(seed), size(where)
        for number in range(1, steps + 1):
            length = draw.randint(longest // 2, longest)
            outlier = number % OUTLIER_EVERY == 0
            yield step(model, where, rows, 10 * longest if outlier else length)

    def hardest(model: nn.Module, where: Where) -> Loss:
        rows, longest = size(where)
        return step(model, where, rows, 10 * longest)

    return Case(bert, losses, steps=4000, run_steps=1000, hardest=hardest)


def regimes_case() -> Case:
    task = TASKS["TC-Bert"]

    def losses(model: nn.Module, where: Where, steps: int, seed: int) -> Iterator[Loss]:
        layers = model.bert.encoder.layer  # type: ignore[union-attr]
        lower = list(layers[: len(layers) // 2].parameters())  # type: ignore[arg-type,index,operator]
        for parameter in lower:
            parameter.requires_grad_(False)
        its = replace(task, small=where.small)
        for number, length in enumerate(its.padded_lengths(steps, seed=seed)):
            if number == steps // 3:
                for parameter in lower:
                    parameter.requires_grad_(True)
            batch = its.batch(length, where.device)
            late = number >= 2 * steps // 3
            yield lambda batch=batch, late=late: (  # type: ignore[misc]
                under_autocast(model, batch, where.device, late)
            )

    def hardest(model: nn.Module, where: Where) -> Loss:
        its = replace(task, small=where.small)
        longest = max(its.padded_lengths(2000, seed=0))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return loss_of(model, its.batch(longest, where.device))

    return Case(bert, losses, steps=3000, run_steps=1000, hardest=hardest)


def under_autocast(
    model: nn.Module, batch: dict[str, Any], device: str, enabled: bool
) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=enabled):
        loss: torch.Tensor = model(**batch).loss
    return loss


CASES: dict[str, Case] = {
    "regimes": regimes_case(),
    "rows": rows_case(),
    "experts": experts_case(),
    "detector": detector_case(),
    "contrastive": contrastive_case(),
    "outliers": outliers_case(),
    "QA-XLNet": text_case("QA-XLNet", steps=1000, run_steps=250),
    "SFT-Llama": text_case("SFT-Llama", steps=500, run_steps=120),
    "QA-Bert": text_case("QA-Bert", steps=1500),
    "MC-Roberta": text_case("MC-Roberta", steps=2000),
    "TC-Bert": text_case("TC-Bert", steps=2000, run_steps=1000),
}
"""20,000 steps."""
