"""A model as people fine-tune it on long sequences: Llama layers, LoRA, a chunked loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 2048
"""Tokens of which the logits are there at a time."""


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class LlamaLora(nn.Module):
    """Llama's layers with LoRA on all linears; the loss needs the logits of one chunk at a time."""

    def __init__(self, layers: int, rank: int = 16, **overrides: Any) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        shape: dict[str, Any] = {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 65536,
        }
        config = LlamaConfig(**{**shape, "num_hidden_layers": layers, **overrides}, use_cache=False)
        self.model = LlamaModel(config).requires_grad_(False)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.requires_grad_(False)
        for layer in self.model.layers:
            _add_lora(layer, rank)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.model.embed_tokens(input_ids).requires_grad_()
        hidden = self.model(inputs_embeds=embedded).last_hidden_state[0]
        targets = input_ids[0].roll(-1)
        losses = [
            checkpoint(self._loss, part, target, use_reentrant=False)
            for part, target in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        ]
        return torch.stack(losses).sum() / len(targets)

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


def _add_lora(layer: nn.Module, rank: int) -> None:
    for part in list(layer.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                part.register_module(name, LoraLinear(child, rank))


def make(layers: int, device: str, **overrides: Any) -> LlamaLora:
    """On the device, in bf16, in training."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaLora(layers, **overrides).train()
        finally:
            torch.set_default_dtype(torch.float32)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
"""For a try on a CPU."""
