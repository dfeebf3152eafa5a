"""The tasks: real lengths, transformers' configurations with random weights."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common import llama_1b
from mimose.bench.workloads import LENGTHS

Batch = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A model, a batch size and where its lengths come from."""

    name: str
    lengths: str
    batch: int
    make: Callable[[], nn.Module]
    batch_of: Callable[[int, int, str], Batch]
    dtype: torch.dtype = torch.float32
    longest: int = 512

    def padded_lengths(self, steps: int, seed: int = 0) -> list[int]:
        """The padded length of each batch: the longest of a random draw."""
        with (LENGTHS / self.lengths).open() as file:
            rows = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(file)]
        values, weights = [row[0] for row in rows], [row[1] for row in rows]
        draw = random.Random(seed)
        drawn = (max(draw.choices(values, weights, k=self.batch)) for _ in range(steps))
        return [min(length, self.longest) for length in drawn]


def _ids(*shape: int, device: str) -> torch.Tensor:
    return torch.randint(5, 1000, shape, device=device)


def _classified(batch: int, length: int, device: str) -> Batch:
    labels = torch.randint(0, 2, (batch,), device=device)
    return {"input_ids": _ids(batch, length, device=device), "labels": labels}


def _choices(batch: int, length: int, device: str) -> Batch:
    labels = torch.randint(0, 4, (batch,), device=device)
    return {"input_ids": _ids(batch, 4, length, device=device), "labels": labels}


def _spans(batch: int, length: int, device: str) -> Batch:
    start, end = torch.randint(0, length, (2, batch), device=device)
    return {
        "input_ids": _ids(batch, length, device=device),
        "start_positions": start,
        "end_positions": end,
    }


def _language(batch: int, length: int, device: str) -> Batch:
    ids = _ids(batch, length, device=device)
    return {"input_ids": ids, "labels": ids}


def _bert_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(attn_implementation="eager"))


def _bert_reader() -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    return BertForQuestionAnswering(BertConfig(attn_implementation="eager"))


def _roberta_chooser() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMultipleChoice

    return RobertaForMultipleChoice(
        RobertaConfig(attn_implementation="eager", max_position_embeddings=514)
    )


def _xlnet_reader() -> nn.Module:
    from transformers import XLNetConfig, XLNetForQuestionAnsweringSimple

    config = XLNetConfig(n_layer=12, d_model=768, n_head=12, d_inner=3072)
    return XLNetForQuestionAnsweringSimple(config)


def _tiny_reader() -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    return BertForQuestionAnswering(
        BertConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=128,
            vocab_size=1000,
        )
    )


TASKS = {
    task.name: task
    for task in (
        Task("TC-Bert", "qqp_bert.csv", 32, _bert_classifier, _classified),
        Task("QA-Bert", "squad_bert.csv", 12, _bert_reader, _spans),
        Task("MC-Roberta", "swag_roberta.csv", 16, _roberta_chooser, _choices),
        Task("QA-XLNet", "squad_xlnet.csv", 16, _xlnet_reader, _spans),
        Task(
            "SFT-Llama",
            "instruct_cl100k.csv",
            8,
            llama_1b,
            _language,
            torch.bfloat16,
            longest=4096,
        ),
        Task("tiny", "qqp_bert.csv", 4, _tiny_reader, _spans),
    )
}
