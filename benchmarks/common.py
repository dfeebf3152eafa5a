"""What the benchmarks here share: their command line, what they record, two models."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from mimose.bench import circumstances as shared
from mimose.bench.extras import BenchError

FOLDER = Path(__file__).parent


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line with what every script takes: where to write, and what code is accepted."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="measure code that is not a commit's; the results say so",
    )
    return parser


def circumstances(allow_dirty: bool = False) -> dict[str, Any]:
    """Where and with what a result was measured; the end where that could not be traced."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return shared.circumstances(device, allow_dirty=allow_dirty, scripts=FOLDER)
    except BenchError as error:
        raise SystemExit(str(error)) from None


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
