"""The text models: transformers' configurations with random weights, full and small.

`small` shrinks width and depth, so that the same code runs in seconds on a CPU.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mimose.bench.extras import need


def bert_classifier(small: bool, attention: str) -> nn.Module:
    return _encoder("Bert", "SequenceClassification", small, attention)


def bert_reader(small: bool, attention: str) -> nn.Module:
    return _encoder("Bert", "QuestionAnswering", small, attention)


def roberta_chooser(small: bool, attention: str) -> nn.Module:
    return _encoder(
        "Roberta", "MultipleChoice", small, attention, max_position_embeddings=514, pad_token_id=1
    )


def xlnet_reader(small: bool, attention: str) -> nn.Module:
    shape = {"n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072, "vocab_size": 32000}
    if small:
        shape = {"n_layer": 4, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": 1000}
    return from_transformers("XLNetForQuestionAnsweringSimple", "XLNetConfig", shape)


def llama(small: bool, attention: str) -> nn.Module:
    """One billion parameters: the shape of Llama 3.2 1B with a vocabulary of 32,000."""
    shape: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
    }
    if small:
        shape |= {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        shape |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 1000}
    shape |= {"use_cache": False, "attn_implementation": attention}
    return from_transformers("LlamaForCausalLM", "LlamaConfig", shape)


def t5_base(small: bool, attention: str) -> nn.Module:
    shape: dict[str, Any] = {
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
        "vocab_size": 32128,
    }
    if small:
        shape |= {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 4, "num_heads": 2}
        shape |= {"vocab_size": 1000}
    shape |= {"use_cache": False, "decoder_start_token_id": 0, "attn_implementation": attention}
    return from_transformers("T5ForConditionalGeneration", "T5Config", shape)


def _encoder(family: str, head: str, small: bool, attention: str, **more: Any) -> nn.Module:
    shape: dict[str, Any] = {"attn_implementation": attention, **more}
    if small:
        shape |= {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        shape |= {"intermediate_size": 64, "vocab_size": 1000}
    return from_transformers(f"{family}For{head}", f"{family}Config", shape)


def from_transformers(model: str, config: str, shape: dict[str, Any]) -> nn.Module:
    """A model of this class, with random weights, from a configuration of this class."""
    transformers = need("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**shape))
    return made
