"""TRL's SFTTrainer with LoRA: every layer checkpointed, as is its default, against mimose.

    python examples/sft_lora.py --memory-budget 20GiB
"""

import argparse
import random
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from mimose.integrations.huggingface import enable
from mimose.memory import meter_for

CUDA = torch.cuda.is_available()
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 1000}


def train(memory_budget: str | None, steps: int) -> None:
    set_seed(0)
    # As instructions are: most of them short, few long.
    lengths = [min(2048 if CUDA else 256, int(random.lognormvariate(4.5, 0.9))) for _ in range(999)]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>"))
    config = LlamaConfig(**(LARGE if CUDA else SMALL), num_attention_heads=8)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config).to(torch.bfloat16 if CUDA else torch.float32),
        args=SFTConfig(tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8,
                       bf16=CUDA, report_to="none", save_strategy="no", disable_tqdm=True),
        train_dataset=Dataset.from_list([{"input_ids": [7] * (n + 2)} for n in lengths]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        peft_config=LoraConfig(target_modules="all-linear"),
    )  # fmt: skip
    if memory_budget is not None:
        enable(trainer, memory_budget=memory_budget)  # the one line that matters
    meter, began = meter_for(trainer.args.device), time.perf_counter()
    meter.reset_peak()
    trainer.train()
    spent, peak = (time.perf_counter() - began) / steps, meter.read().peak
    print(f"{memory_budget or 'default':>8}: {spent * 1e3:.0f} ms a step, peak {peak >> 20} MiB")
    meter.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="40GiB" if CUDA else "400MiB")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 12)
    options = parser.parse_args()
    for budget in (None, options.memory_budget):
        train(budget, options.steps)
