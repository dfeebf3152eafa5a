"""Does the budget hold as users start it: an empty environment, PyTorch's allocator untouched?

    python benchmarks/allocator.py --out results.json

Each case trains in a process of its own, started without any variable that configures the
allocator, under `enforce=True` and without `handle.retry`. The budget is what plain training
exceeds on half of the steps, or, where that is more, what every plan needs at the longest batch.
`--allocator leave` shows what happens without mimose's own settings.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mimose
from common import circumstances, parser_of, save
from mimose.bench.workloads import PAPER_TASKS
from mimose.memory import ALLOCATOR_VARIABLES
from tasks import TASKS

LEFT_ALONE = ("Swin", "wav2vec2", "Qwen2-bf16", "ViT-autocast", "BART", "QA-Bert")
FLOOR_MARGIN = 1.13
"""A budget leaves the reserve (8 % at first) free above what every plan needs."""

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, the losses of its steps, and what autocast to run them under."""

    make: Callable[[], nn.Module]
    batch: Callable[[random.Random, str], dict[str, Any]]
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    def losses(self, model: nn.Module, steps: int, device: str) -> Iterator[Loss]:
        draw = random.Random(1)
        for _ in range(steps):
            batch = self.batch(draw, device)

            def loss(batch: dict[str, Any] = batch) -> torch.Tensor:
                with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
                    value: torch.Tensor = model(**batch).loss
                return value

            yield loss


def text(draw: random.Random, device: str, *, rows: int, low: int, high: int) -> dict[str, Any]:
    """Token ids that are their own labels."""
    tokens = torch.randint(5, 1000, (rows, draw.randint(low, high)), device=device)
    return {"input_ids": tokens, "labels": tokens}


def images(
    draw: random.Random, device: str, *, rows: int, low: int, high: int, grain: int
) -> dict[str, Any]:
    """Images of any height and width, most of them not square."""
    height, width = (draw.randrange(low, high + 1, grain) for _ in range(2))
    pixels = torch.rand(rows, 3, height, width, device=device)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (rows,), device=device)}


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=10))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=10))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=10))


def vit_batch(draw: random.Random, device: str) -> dict[str, Any]:
    batch = images(draw, device, rows=32, low=160, high=384, grain=16)
    return {**batch, "interpolate_pos_encoding": True}


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(Wav2Vec2Config(ctc_zero_infinity=True))


def wav2vec2_batch(draw: random.Random, device: str) -> dict[str, Any]:
    waves = torch.randn(8, draw.randint(16_000, 160_000), device=device)
    return {"input_values": waves, "labels": torch.randint(1, 30, (8, 20), device=device)}


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=8000,
        )
    )


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(d_model=768, encoder_layers=6, decoder_layers=6, vocab_size=8000)
    )


def bart_batch(draw: random.Random, device: str) -> dict[str, Any]:
    source, target = draw.randint(64, 768), draw.randint(32, 384)
    return {
        "input_ids": torch.randint(5, 1000, (16, source), device=device),
        "labels": torch.randint(5, 1000, (16, target), device=device),
    }


def deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    return DebertaV2ForSequenceClassification(
        DebertaV2Config(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            vocab_size=8000,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=256,
            share_att_key=True,
        )
    )


def deberta_batch(draw: random.Random, device: str) -> dict[str, Any]:
    tokens = torch.randint(5, 1000, (12, draw.randint(32, 448)), device=device)
    return {"input_ids": tokens, "labels": torch.randint(0, 2, (12,), device=device)}


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            intermediate_size=4096,
            vocab_size=8000,
        )
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            d_model=512,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
        )
    )


def whisper_batch(draw: random.Random, device: str) -> dict[str, Any]:
    rows = draw.randint(2, 12)
    labels = torch.randint(5, 1000, (rows, draw.randint(16, 400)), device=device)
    return {"input_features": torch.rand(rows, 80, 3000, device=device), "labels": labels}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            vocab_size=8000,
        )
    )


def paper_case(name: str) -> Case:
    task = TASKS[name]
    lengths = task.padded_lengths(1_000, seed=1)

    def batch(draw: random.Random, device: str) -> dict[str, Any]:
        return task.batch(draw.choice(lengths), device)

    return Case(task.make, batch, task.dtype)


CASES: dict[str, Case] = {  # the slowest first, since several run at once
    "ConvNeXt": Case(convnext, lambda d, v: images(d, v, rows=32, low=160, high=384, grain=8)),
    "Mixtral": Case(mixtral, lambda d, v: text(d, v, rows=8, low=64, high=768)),
    "Swin": Case(swin, lambda d, v: images(d, v, rows=32, low=224, high=448, grain=8)),
    "wav2vec2": Case(wav2vec2, wav2vec2_batch),
    "Qwen2-bf16": Case(qwen2, lambda d, v: text(d, v, rows=8, low=64, high=1536), torch.bfloat16),
    "ViT-autocast": Case(vit, vit_batch, autocast=True),
    "BART": Case(bart, bart_batch),
    "DeBERTa-v2": Case(deberta, deberta_batch),
    "GPT-NeoX": Case(gpt_neox, lambda d, v: text(d, v, rows=8, low=64, high=1024)),
    "Whisper": Case(whisper, whisper_batch),
    **{name: paper_case(name) for name in PAPER_TASKS},
}


def made(case: Case, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.make().to(device, case.dtype).train()
    return model, torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


def plain_peaks(case: Case, steps: int) -> list[int]:
    """What each step of plain training has in use at most, once there is optimizer state."""
    model, optimizer = made(case, "cuda")
    peaks = []
    for loss in case.losses(model, steps, "cuda"):
        torch.cuda.reset_peak_memory_stats()
        loss().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        optimizer.step()
        optimizer.zero_grad()
    return peaks


def floor(case: Case, steps: int, peaks: list[int]) -> int:
    """What the largest steps have in use at most with every block recomputed."""
    model, optimizer = made(case, "cuda")
    by_peak = sorted(range(steps), key=lambda i: peaks[i])
    wanted = {*by_peak[:2], *by_peak[-2:]}  # the smallest make the optimizer's state
    with mimose.auto_checkpoint(
        model, "100%", planner="recompute_all", allocator="leave"
    ) as handle:
        for number, loss in enumerate(case.losses(model, steps, "cuda")):
            if number in wanted:
                loss().backward()
                optimizer.step()
                optimizer.zero_grad()
        return handle.stats().peak_bytes


def collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def train(name: str, steps: int, allocator: str) -> dict[str, Any]:
    case = CASES[name]
    torch.set_float32_matmul_precision("high")
    peaks = plain_peaks(case, steps)
    collect()
    least = floor(CASES[name], steps, peaks)
    collect()
    budget = max(int(statistics.median(peaks)), int(FLOOR_MARGIN * least))
    result = under_budget(case, steps, budget, allocator)
    result["plain_exceeds"] = sum(peak > budget for peak in peaks) / len(peaks)
    result["floor_over_budget"] = least / budget
    return result


def under_budget(case: Case, steps: int, budget: int, allocator: str) -> dict[str, Any]:
    model, optimizer = made(case, "cuda")
    handle = mimose.auto_checkpoint(model, budget, enforce=True, allocator=allocator)
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    lost: list[dict[str, Any]] = []
    held, most_reserve, began = 0, 0, time.perf_counter()
    for number, loss in enumerate(case.losses(model, steps, "cuda")):
        try:
            loss().backward()
            optimizer.step()
        except torch.OutOfMemoryError as error:
            lost.append({"step": number, **unused(str(error), budget)})
        optimizer.zero_grad()
        held = max(held, torch.cuda.max_memory_reserved())
        most_reserve = max(most_reserve, handle.stats().reserve_bytes or 0)
    torch.cuda.synchronize()
    stats = handle.stats()
    handle.detach()
    return {
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "budget": budget,
        "out_of_memory": lost,
        "held_over_budget": max(held, stats.peak_held_bytes) / budget,
        "reserve_share": (stats.reserve_bytes or 0) / budget,
        "most_reserve_share": most_reserve / budget,
        "observed_steps": stats.observed_steps,
        "planned_steps": stats.planned_steps,
        "runs_recomputed": stats.runs_recomputed,
        "runs_kept": stats.runs_kept,
        "allocator_settings": settings,
    }


def unused(message: str, budget: int) -> dict[str, Any]:
    """What the allocator held and nothing used when it ran out, as it says itself."""
    found = re.search(r"([\d.]+) (KiB|MiB|GiB) is reserved by PyTorch but unallocated", message)
    if found is None:
        return {"message": message[:300]}
    unit = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[found[2]]
    return {"unused_share": float(found[1]) * unit / budget}


def in_a_process(name: str, steps: int, allocator: str) -> dict[str, Any]:
    environment = {
        key: value for key, value in os.environ.items() if key not in ALLOCATOR_VARIABLES
    }
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, str(steps), allocator],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if done.returncode == 0 else {"failed": done.stderr[-2000:]}
    print(name, allocator, json.dumps(result)[:600], flush=True)
    return dict(result)


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        name, steps, allocator = sys.argv[2:]
        print(json.dumps(train(name, int(steps), allocator)))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--left-alone", nargs="*", default=list(LEFT_ALONE), choices=list(CASES))
    parser.add_argument("--at-once", type=int, default=4, help="processes at a time")
    options = parser.parse_args()
    results = {
        "benchmark": "allocator",
        **circumstances(options.allow_dirty),
        "steps": options.steps,
    }
    asked = [(name, "auto") for name in options.cases]
    asked += [(name, "leave") for name in options.left_alone]
    results |= {"auto": {}, "leave": {}}

    def run(one: tuple[str, str]) -> None:
        name, allocator = one
        results[allocator][name] = in_a_process(name, options.steps, allocator)
        save(results, options.out)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run, asked))


if __name__ == "__main__":
    main()
