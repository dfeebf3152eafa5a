"""What steps cost that may be evicted from or are observed; a part of `content.py`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from common import bert_base, llama_1b, spread
from content_cases import SMALL_BERT, Loss, Trained, clear, words
from mimose.bench.measuring import LatestStep
from mimose.costs import Option
from mimose.interception import find_blocks
from mimose.planning import Optimal
from mimose.training import Engine, Scheduler, StepRecord
from mimose.units import parse_budget

SMALL_LLAMA = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL_LLAMA |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 500}
WAYS = ("kept", "evictable", "observed", "observed, one recomputed")


class Forced(Scheduler):
    """Lets every step that has a plan run in one way, whatever is known of it."""

    way = WAYS[0]

    def decide(self, *args: Any, **kwargs: Any) -> Any:
        decision = super().decide(*args, **kwargs)
        choices = dict(decision.cached.choices)
        if not choices:
            return decision
        if self.way == WAYS[3]:  # as mimose does it for one block of each kind
            second = list(choices)[1]
            decision = decision.with_choices({**choices, second: Option.RECOMPUTE})
        seen = self.way.startswith("observed")
        cached = replace(decision.cached, evictable=frozenset(choices))
        return decision._replace(
            cached=cached, evictable=self.way != "kept", observed=seen, measured=seen
        )


def evictable(name: str, model: nn.Module, loss: Loss, device: str, steps: int) -> dict[str, Any]:
    """Seconds of steps that take turns; of two in a row the second counts."""
    forced, trained, latest = Forced(Optimal()), Trained(model, device), LatestStep()
    blocks = find_blocks(model)
    engine = Engine(model, blocks, parse_budget("100%"), forced)
    engine.events.subscribe(latest)
    engine.attach(blocks)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(-8, steps):  # at first nothing is known, and the device is slow
        for way in WAYS:
            forced.way = way if number >= 0 else WAYS[0]
            trained.step(number, loss)
            took, record = trained.step(number, loss), latest.record
            if number >= 0 and took is not None and ran_as(way, record):
                seconds[way].append(took)
    engine.detach()
    spreads = {way: spread(values) for way, values in seconds.items()}
    kept = spreads["kept"]["median"]
    over = {way: found["median"] / kept for way, found in spreads.items()}
    print("evictable", name, f"kept {kept * 1e3:.1f} ms", over, flush=True)
    return {"seconds": spreads, "over_kept": over}


def ran_as(way: str, record: StepRecord | None) -> bool:
    """Whether a step was observed, and recomputed, just as this way has it."""
    if record is None or record.plan is None:
        return False
    recomputed = 1 if way == WAYS[3] else 0
    return record.plan.recomputed == recomputed and record.observed == way.startswith("observed")


def evictable_models(device: str, steps: int) -> dict[str, Any]:
    small, found = device == "cpu", {}
    for name in ("BERT-base 32×64", "Llama 1B 4×1024"):
        llama = name.startswith("Llama")
        if llama:
            made = llama_1b(**(SMALL_LLAMA if small else {})).to(device, torch.bfloat16)
        else:
            made = bert_base(**(SMALL_BERT if small else {})).to(device)
        rows, length = (4, 1024) if llama else (32, 64)
        tokens = words(0, 500, rows, length // (16 if small else 1), device)
        labels = tokens if llama else tokens[:, 0] % 2
        loss = functools.partial(loss_of, made, tokens, labels)
        found[name] = evictable(name, made, loss, device, steps)
        del made, loss
        clear(device)
    return found


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=labels).loss
