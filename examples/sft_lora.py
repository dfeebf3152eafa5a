"""TRL's SFTTrainer with LoRA on instruction-like lengths: three ways, their times and peaks.

Run `python examples/sft_lora.py --memory-budget 40GiB`.
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
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 99}


def trainer_of(steps: int, **changes: object) -> SFTTrainer:
    set_seed(0)  # lengths as instructions have them: most are short, few are long
    lengths = [min(2000 if CUDA else 150, int(random.lognormvariate(4.5, 0.9))) for _ in range(999)]
    words = Tokenizer(models.WordLevel({"0": 0, "1": 1}, "0"))
    config = LlamaConfig(**(LARGE if CUDA else SMALL), num_attention_heads=8)
    return SFTTrainer(
        model=LlamaForCausalLM(config).to(torch.bfloat16 if CUDA else torch.float32),
        args=SFTConfig(tempfile.mkdtemp(), max_steps=steps, save_strategy="no", report_to="none",
                       per_device_train_batch_size=8 if CUDA else 2, bf16=CUDA, **changes),
        train_dataset=Dataset.from_list([{"input_ids": [7] * (n + 2)} for n in lengths]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1"),
        peft_config=LoraConfig(target_modules="all-linear"),
    )  # fmt: skip


def measure(name: str, trainer: SFTTrainer) -> None:
    trainer.train()  # warms up, and mimose observes; what it has learned serves the next run
    meter, began = meter_for(trainer.args.device), time.perf_counter()
    meter.reset_peak()
    trainer.train()
    spent = (time.perf_counter() - began) / trainer.args.max_steps
    print(f"{name:22} {spent * 1e3:6.0f} ms a step, peak {meter.read().peak >> 20} MiB")
    meter.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="40GiB" if CUDA else "70MiB")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 8)
    options = parser.parse_args()
    measure("everything kept", trainer_of(options.steps, gradient_checkpointing=False))
    measure("every layer recomputed", trainer := trainer_of(options.steps))  # TRL's default
    enable(trainer, memory_budget=options.memory_budget)  # the one line that matters
    measure("mimose", trainer)
