"""Small random models to break: each has blocks, a head, and batches that vary in length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import models
from parts import Layer

Batch = dict[str, Any]

_BATCH = 24


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Normed(nn.Module):
    """A residual convolution with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Convolutions(nn.Module):
    """A chain of them on top of an embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Normed(16) for _ in range(layers))
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(2))


class Chosen(nn.Module):
    """Its later blocks see only rows that chance has chosen: memory depends on content."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for i, layer in enumerate(self.layers):
            if i == len(self.layers) // 2:
                share = torch.rand(()).item()
                x = x[:, : max(1, int(share * x.shape[1]))]
            x = layer(x)
        return self.head(x.mean(1))


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "encoder": lambda layers: models.Encoder(layers, width=16),
    "tied": Tied,
    "convolutions": Convolutions,
    "chosen": Chosen,
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    layers = model.encoder.layers if isinstance(model, models.Encoder) else model.layers
    return list(layers)  # type: ignore[arg-type]


def batches(dice: random.Random, count: int) -> list[Batch]:
    """All of one length, or each of its own."""
    fixed = dice.choice([None, None, dice.randint(20, 60)])
    lengths = [fixed or dice.randint(10, 60) for _ in range(count)]
    lengths[0] = max(lengths)
    ids = torch.Generator().manual_seed(dice.randrange(1 << 30))
    return [{"input_ids": torch.randint(0, 50, (_BATCH, n), generator=ids)} for n in lengths]
