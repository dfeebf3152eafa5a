"""What every benchmark here records: the machine, the versions, the commit, the date."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from mimose.bench import circumstances as shared

RESULTS = Path(__file__).parent / "results"


def circumstances(commit: str | None) -> dict[str, Any]:
    """Where and with what a result was measured."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "date": shared.today(),
        "commit": shared.commit(commit),
        **shared.circumstances(device),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median with the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high, "n": len(values)}


def save(results: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def bert_base(**overrides: Any) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(attn_implementation="eager", **overrides))


def llama_1b(**overrides: Any) -> torch.nn.Module:
    """A Llama of one billion parameters (the shape of Llama 3.2 1B), SDPA attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **overrides}))
