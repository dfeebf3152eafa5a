"""The small encoder that the demo trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """The size of the model and of its batches."""

    width: int
    layers: int
    batch: int
    longest: int


class Encoder(nn.Module):
    """A transformer encoder that classifies token sequences."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden.mean(1))
        return logits


class Block(nn.Module):
    """Attention and an MLP. The attention scores are saved for the backward."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attend(self.norm_in(hidden)))
        raised = nn.functional.gelu(self.up(self.norm_out(hidden)))
        out: torch.Tensor = hidden + self.dropout(self.down(raised))
        return out

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = self.dropout(scores.softmax(-1)) @ value
        out: torch.Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: Shape,
    length: int,
    device: torch.device,
) -> float:
    """One step of an ordinary training loop."""
    tokens = torch.randint(0, 1000, (shape.batch, length), device=device)
    labels = torch.randint(0, 2, (shape.batch,), device=device)
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
