"""TRL's trainers with LoRA, on quantised layers too, train under mimose as without."""

from __future__ import annotations

import functools
import logging
import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from trainers import arguments, losses, twins
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from mimose.integrations.huggingface import enable


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL computes the loss in tiles of this many tokens: more than a small model's all."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 256)


WORDS = [f"w{i}" for i in range(60)]
LORA = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    model = WordLevel({**special, **{word: 3 + i for i, word in enumerate(WORDS)}}, "<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=96,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def said(dice: random.Random, low: int = 5, high: int = 120) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(low, high)))


def answers() -> Dataset:
    dice = random.Random(0)
    return Dataset.from_list(
        [{"prompt": said(dice, 3, 30) + " ", "completion": said(dice)} for _ in range(48)]
    )


def preferences() -> Dataset:
    dice = random.Random(0)
    return Dataset.from_list(
        [
            {"prompt": said(dice, 3, 20) + " ", "chosen": said(dice), "rejected": said(dice)}
            for _ in range(32)
        ]
    )


def sft(model: nn.Module | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    return SFTTrainer(
        model=model or llama(),
        args=SFTConfig(**arguments(**changes), bf16=False),
        train_dataset=answers(),
        processing_class=tokenizer(),
        peft_config=LORA,
    )


def quantised() -> nn.Module:
    """A Llama whose linear layers are frozen in 4 bits, as QLoRA has them."""
    linear = pytest.importorskip("bitsandbytes").nn.Linear4bit
    model = llama()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "layers" in name:
            small = linear(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            small.load_state_dict(layer.state_dict())
            model.set_submodule(name, small.to("cpu"))
    model.is_loaded_in_4bit = True
    return model


def test_lora_fine_tuning_is_the_same_bit_for_bit_and_within_the_budget() -> None:
    pair = twins(functools.partial(sft, gradient_checkpointing=False), 0.7)
    pair.assert_same()
    pair.assert_planned()


def test_checkpointing_that_sft_switches_on_by_default_is_taken_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = sft(gradient_checkpointing=False, max_steps=8)
    plain.train()
    ours = sft(max_steps=8)
    assert ours.args.gradient_checkpointing
    enabled = enable(ours, "1GiB")
    with caplog.at_level(logging.INFO, "mimose"):
        ours.train()
    assert "instead of the model's own checkpointing" in caplog.text
    assert losses(ours) == losses(plain)
    assert enabled.stats().runs_kept
    assert not enabled.stats().runs_recomputed


def test_lora_on_layers_of_four_bits_is_the_same_bit_for_bit() -> None:
    pair = twins(lambda: sft(quantised(), gradient_checkpointing=False), 0.7)
    pair.assert_same()
    pair.assert_planned(steps=1)  # each recompute unpacks weights anew: it observes for longer


def test_preference_training_is_the_same_bit_for_bit() -> None:
    def make() -> Trainer:
        torch.manual_seed(0)
        return DPOTrainer(
            model=llama(),
            args=DPOConfig(
                **arguments(max_steps=12, per_device_train_batch_size=2),
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=preferences(),
            processing_class=tokenizer(),
            peft_config=LORA,
        )

    pair = twins(make, 0.7)
    pair.assert_same()
    pair.assert_planned()
