"""Small real models, one of each kind that people train, each with a batch to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[nn.Module, dict[str, Any]]
"""A model in training mode, and the keyword arguments of its forward."""


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, 50, (batch, length))


def _text(model: nn.Module, batch: int, length: int, **extra: Any) -> Case:
    return model, {"input_ids": _ids(batch, length), **extra}


_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def bert(batch: int = 2, length: int = 9, **config: Any) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(vocab_size=50, **{**_TINY, **config}))
    return _text(model, batch, length, labels=torch.randint(0, 2, (batch,)))


def roberta(batch: int = 2, length: int = 9) -> Case:
    from transformers import RobertaConfig, RobertaForMultipleChoice

    model = RobertaForMultipleChoice(RobertaConfig(vocab_size=50, **_TINY))
    return model, {
        "input_ids": torch.randint(5, 50, (batch, 4, length)),
        "labels": torch.randint(0, 4, (batch,)),
    }


def xlnet(batch: int = 2, length: int = 9) -> Case:
    from transformers import XLNetConfig, XLNetForQuestionAnsweringSimple

    config = XLNetConfig(d_model=32, n_layer=3, n_head=2, d_inner=64, vocab_size=50)
    spans = {
        name: torch.randint(0, length, (batch,)) for name in ("start_positions", "end_positions")
    }
    return _text(XLNetForQuestionAnsweringSimple(config), batch, length, **spans)


def gpt2(batch: int = 2, length: int = 9) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_layer=3, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=2
    )
    model, batch_ = _text(GPT2LMHeadModel(config), batch, length)
    return model, {**batch_, "labels": batch_["input_ids"]}


def llama(batch: int = 2, length: int = 9) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    model, batch_ = _text(LlamaForCausalLM(LlamaConfig(vocab_size=50, **_TINY)), batch, length)
    return model, {**batch_, "labels": batch_["input_ids"]}


def lora(batch: int = 2, length: int = 9) -> Case:
    from peft import LoraConfig, get_peft_model

    model, batch_ = llama(batch, length)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return get_peft_model(model, config), batch_  # type: ignore[arg-type]


def t5(batch: int = 2, length: int = 9, target: int = 5) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32,
        num_layers=3,
        num_heads=2,
        d_ff=64,
        d_kv=16,
        vocab_size=50,
        decoder_start_token_id=0,
    )
    return _text(T5ForConditionalGeneration(config), batch, length, labels=_ids(batch, target))


def vit(batch: int = 2, side: int = 32) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **_TINY))
    return model, {
        "pixel_values": torch.randn(batch, 3, side, side),
        "labels": torch.randint(0, 2, (batch,)),
    }


def swin(batch: int = 2, side: int = 32) -> Case:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        embed_dim=16, depths=[2, 2], num_heads=[2, 4], image_size=32, window_size=4, patch_size=2
    )
    return SwinForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, side, side),
        "labels": torch.randint(0, 2, (batch,)),
    }


def resnet(batch: int = 2, side: int = 32) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2])
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, side, side),
        "labels": torch.randint(0, 2, (batch,)),
    }


class Encoder(nn.Module):
    """`nn.TransformerEncoder` between an embedding and a head."""

    def __init__(self, layers: int = 3, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(input_ids)).mean(1))


def encoder(batch: int = 2, length: int = 9) -> Case:
    return _text(Encoder(), batch, length)


class Layers(nn.Sequential):
    """A plain `nn.Sequential` of different layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def sequential(batch: int = 4, length: int = 9) -> Case:
    layers = [
        nn.Linear(8, 16),
        nn.Dropout(0.1),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Linear(16, 4),
    ]
    return Layers(*layers), {"x": torch.randn(batch, length, 8)}


ALL: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        bert,
        roberta,
        xlnet,
        gpt2,
        llama,
        lora,
        t5,
        vit,
        swin,
        resnet,
        encoder,
        sequential,
    )
}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """A scalar to train on, whatever the model returns."""
    out = model(**batch)
    if isinstance(out, torch.Tensor):
        return out.float().pow(2).mean()
    return out.loss
