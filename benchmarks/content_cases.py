"""The models of `content.py`, and their steps: step k sees what seed k draws.

`CASES` take memory that depends on what is in a batch, not on its size alone. On a CPU all models
are small.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from common import bert_base
from mimose.bench.workloads import TASKS
from promise_cases import Mlp

Loss = Callable[[], torch.Tensor]
WORDS = 1000
SMALL_BERT = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """A model, and the loss of each step."""

    model: nn.Module
    loss: Callable[[int], Loss]
    """Of a step's number: what computes its loss."""
    options: dict[str, Any] = field(default_factory=dict)
    """What mimose must be told of the model."""


class Rows(nn.Module):
    """Six blocks on all tokens, then six on those whose word is in the first half of all words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.all_tokens = nn.ModuleList(Mlp(width) for _ in range(6))
        self.chosen = nn.ModuleList(Mlp(width) for _ in range(6))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        for block in self.all_tokens:
            hidden = block(hidden)
        hidden = hidden[tokens.flatten() < WORDS // 2]
        for block in self.chosen:
            hidden = block(hidden)
        return self.head(hidden.mean(0))


def rows(device: str, steps: int) -> Case:
    count, longest, width = (4, 48, 32) if device == "cpu" else (64, 512, 768)
    model = Rows(width).to(device)

    def loss(number: int) -> Loss:
        draw = random.Random(number)
        length, share = draw.randint(longest // 8, longest), draw.uniform(0.1, 1.0)
        tokens = words(number, WORDS // 2, count, length, device)
        passed = torch.arange(count * length, device=device) >= share * count * length
        tokens += WORDS // 2 * passed.view(count, length)
        return lambda: model(tokens).sum()

    return Case(model, loss)


def words(seed: int, known: int, count: int, length: int, device: str) -> torch.Tensor:
    """Texts of the first `known` words."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, known, (count, length), device=device, generator=generator)


class Experts(nn.Module):
    """Attention, then one of eight experts for each token.

    The experts run as one batch, padded to the load of the fullest.
    """

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, max(4, width // 64), batch_first=True)
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.routed(self.norms[1](hidden).flatten(0, 1)).view_as(hidden)

    def routed(self, tokens: torch.Tensor) -> torch.Tensor:
        weight, expert = self.gate(tokens).softmax(-1).max(-1)
        loads = expert.bincount(minlength=len(self.up))
        fullest = int(loads.max())
        order = expert.argsort(stable=True)
        first = (loads.cumsum(0) - loads)[expert[order]]
        place = expert[order] * fullest + torch.arange(len(tokens), device=tokens.device) - first
        padded = tokens.new_zeros(len(self.up) * fullest, tokens.shape[1])
        padded = padded.index_copy(0, place, tokens[order])
        raised = F.gelu(torch.bmm(padded.view(len(self.up), fullest, -1), self.up))
        out = torch.bmm(raised, self.down).flatten(0, 1)
        return out[place[order.argsort()]] * weight[:, None]


class Mixture(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Experts(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def moe(device: str, steps: int) -> Case:
    count, longest, width, layers = (4, 48, 32, 4) if device == "cpu" else (16, 512, 768, 12)
    model = Mixture(width, layers).to(device)

    def loss(number: int) -> Loss:
        draw = random.Random(number)
        length = draw.randint(longest // 8, longest)
        # Few different words go to few experts.
        known = int(8 * (WORDS / 8) ** draw.random())
        tokens = words(number, known, count, length, device)
        return lambda: model(tokens)

    return Case(model, loss)


def detector(device: str, steps: int) -> Case:
    task, small = TASKS["Faster-RCNN"], device == "cpu"
    assert task.input_size is not None
    model = task.make(small, task.attention).to(device)
    shapes = task.shapes(steps + 1, scale=1, small=small)  # the last one is not full

    def loss(number: int) -> Loss:
        batch = task.batch(shapes[number], number, torch.device(device))
        return lambda: task.loss(model(**batch))

    return Case(model, loss, {"input_size": task.input_size(small)})


CASES: dict[str, Callable[[str, int], Case]] = {"rows": rows, "moe": moe, "detector": detector}


def with_outlier(device: str, outlier_at: int) -> Case:
    """Batches of 32 to 96 tokens, and one of 960."""
    small = device == "cpu"
    shape: dict[str, Any] = {"num_hidden_layers": 4, **SMALL_BERT} if small else {}
    model = bert_base(max_position_embeddings=1024, **shape).to(device)

    def loss(number: int) -> Loss:
        length = 960 if number == outlier_at else random.Random(number).randint(32, 96)
        tokens = words(number, 1000, 8, length // (4 if small else 1), device)
        return lambda: model(input_ids=tokens, labels=tokens[:, 0] % 2).loss

    return Case(model, loss)


class Trained:
    """A model with its optimizer, on one device; its steps are timed and metered."""

    def __init__(self, model: nn.Module, device: str, rate: float = 0.0) -> None:
        self.model, self.device = model.train(), device
        fused = device == "cuda" or None
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, fused=fused)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def step(
        self, number: int, loss: Loss, run: Callable[..., Any] = lambda step: step()
    ) -> float | None:
        """One step in seconds; None if memory ran out. `run` calls its forward and backward."""
        torch.manual_seed(number)
        self.wait()
        began = time.perf_counter()
        try:
            run(lambda: loss().backward())
            self.optimizer.step()
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad()
            return None
        self.optimizer.zero_grad()
        self.wait()
        return time.perf_counter() - began


def clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def fresh(make: Callable[[], Any], device: str) -> Any:
    clear(device)
    torch.manual_seed(0)
    return make()
