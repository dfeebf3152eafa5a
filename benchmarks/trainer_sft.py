"""An SFT-like run through transformers' Trainer: plain, its own checkpointing, and mimose.

    python benchmarks/trainer_sft.py --out results.json

A Llama of one billion parameters in bf16 on real instruction lengths, batches of 8 padded to their
longest. Under mimose the budget is what plain training exceeds on half of the steps, and it is the
allocator's hard limit. The three take turns; every run starts from the same weights and sees the
same batches, so the loss curves can be held against each other. A first run that is not counted
warms up: kernels are loaded and chosen anew for each length that a process has not seen.
"""

from __future__ import annotations

import argparse
import csv
import gc
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from common import circumstances, llama_1b, parser_of, save, spread
from mimose.bench.batches import LENGTHS
from mimose.bench.circumstances import settle_device
from mimose.integrations.huggingface import enable

WAYS = ("plain", "gradient_checkpointing", "mimose")
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def texts(count: int, longest: int) -> list[dict[str, torch.Tensor]]:
    with (LENGTHS / "instruct_cl100k.csv").open() as file:
        rows = [(int(r["length"]), int(r["count"])) for r in csv.DictReader(file)]
    draw = random.Random(0)
    lengths = draw.choices([r[0] for r in rows], [r[1] for r in rows], k=count)
    torch.manual_seed(0)
    return [{"input_ids": torch.randint(5, 999, (min(n, longest),))} for n in lengths]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "labels": labels}


class StepTimes(TrainerCallback):
    """The end of every step, on a device that has done its work."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def train(way: str, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = llama_1b(**(TINY if options.tiny else {})).to(torch.bfloat16)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = StepTimes()
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_checkpointing=way == "gradient_checkpointing",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    dataset = texts(8 * options.steps, 200 if options.tiny else 4096)
    trainer = Trainer(model, arguments, padded, dataset, callbacks=[times])
    enabled = None
    if way == "mimose":
        enabled = enable(trainer, budget, enforce=torch.cuda.is_available())
    began = time.perf_counter()
    trainer.train()
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "step_ends": [end - began for end in times.ends],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }
    if torch.cuda.is_available():
        result["peak"] = torch.cuda.max_memory_allocated()
        result["held"] = torch.cuda.max_memory_reserved()
    if enabled is not None:
        stats = enabled.stats()
        result.update(
            peak=stats.peak_bytes,
            held=stats.peak_held_bytes,
            observed_steps=stats.observed_steps,
            recoveries=stats.recoveries,
            runs_recomputed=stats.runs_recomputed,
            runs_kept=stats.runs_kept,
        )
    return result


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    seconds = {way: [run["seconds"] for run in runs[way]] for way in WAYS}
    plain = runs["plain"][0]["losses"]
    pairs = list(zip(seconds["mimose"], seconds["gradient_checkpointing"], strict=True))
    to_plain = [m / p for m, p in zip(seconds["mimose"], seconds["plain"], strict=True)]
    return {
        "median_seconds": {way: statistics.median(of) for way, of in seconds.items()},
        "mimose_over_checkpointing": [m / c for m, c in pairs],
        "mimose_over_plain": to_plain,
        "largest_loss_difference": {
            way: max(abs(a - b) for a, b in zip(plain, runs[way][0]["losses"], strict=True))
            for way in WAYS
        },
        "spread_of_plain": spread(seconds["plain"]) if len(seconds["plain"]) > 1 else None,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-gib", type=float, default=9.65)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    options = parser.parse_args()
    settle_device(None)
    budget = int(options.budget_gib * 2**30)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    results = {"benchmark": "trainer_sft", **circumstances(options.allow_dirty), "budget": budget}
    train("plain", options, budget)
    for _ in range(options.rounds):
        for way in WAYS:
            runs[way].append(train(way, options, budget))
            last = runs[way][-1]
            print(way, {k: v for k, v in last.items() if k not in ("step_ends", "losses")})
            save({**results, "runs": runs}, options.out)
    save({**results, "runs": runs, "summary": summary(runs)}, options.out)
    print(summary(runs))


if __name__ == "__main__":
    main()
