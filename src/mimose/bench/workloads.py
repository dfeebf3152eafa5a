"""The tasks: a model, a batch size, and batches with real lengths.

A run is an epoch over samples drawn at random: each batch is padded to its longest, and the last
one is half full. Token ids are random; what they are changes neither memory nor time.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mimose.bench import models
from mimose.bench.extras import BenchError

LENGTHS = Path(__file__).parent / "lengths"

PAPER_TASKS = ("MC-Roberta", "QA-XLNet", "QA-Bert", "TC-Bert")

_SMALL_ROWS = 4
_SMALLER = 2
"""By how much lengths are divided for small models."""

Batch = dict[str, torch.Tensor]
Ids = Callable[..., torch.Tensor]
"""Random whole numbers: `ids(high, *shape)`."""


@dataclass(frozen=True, slots=True, order=True)
class BatchShape:
    """How many samples, and the length they are padded to: two lengths for source and target."""

    rows: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A model, a batch size and where its lengths come from."""

    name: str
    rows: int
    sources: tuple[str, ...]
    make: Callable[[bool, str], nn.Module]
    """Of `small` and the attention's name."""
    fill: Callable[[Ids, int, tuple[int, ...]], Batch]
    precision: str = "fp32"
    attention: str = "eager"
    attentions: tuple[str, ...] = ("eager", "sdpa")
    longest: int = 512

    def shapes(self, steps: int, *, scale: int, small: bool, seed: int = 0) -> list[BatchShape]:
        """The shape of each batch of a run."""
        rows = self._rows(scale, small)
        draw = random.Random(seed)
        tables = [_counts(source) for source in self.sources]
        counts = [rows] * (steps - 1) + [max(1, rows // 2)]
        return [
            BatchShape(n, tuple(self._padded(draw, t, n, small) for t in tables)) for n in counts
        ]

    def longest_of_data(self, *, scale: int, small: bool) -> BatchShape:
        """The largest batch that the data could give, drawn in a run or not."""
        rows = self._rows(scale, small)
        tables = (_counts(source) for source in self.sources)
        return BatchShape(rows, tuple(self._cut(max(lengths), small) for lengths, _ in tables))

    def _rows(self, scale: int, small: bool) -> int:
        return (_SMALL_ROWS if small else self.rows) * scale

    def _padded(
        self, draw: random.Random, table: tuple[list[int], list[int]], rows: int, small: bool
    ) -> int:
        return self._cut(max(draw.choices(*table, k=rows)), small)

    def _cut(self, length: int, small: bool) -> int:
        length = min(length, self.longest)
        return max(4, length // _SMALLER) if small else length

    def batch(self, shape: BatchShape, number: int, device: torch.device) -> Batch:
        """The batch of this number: the same for everybody, and no draw from the common RNG."""
        generator = torch.Generator(device)
        generator.manual_seed(number)

        def ids(high: int, *dims: int) -> torch.Tensor:
            return torch.randint(0, high, dims, device=device, generator=generator)

        return self.fill(ids, shape.rows, shape.lengths)


def task_named(name: str) -> Task:
    """The task of this name, in whatever case."""
    for known, task in TASKS.items():
        if known.lower() == name.strip().lower():
            return task
    raise BenchError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")


def _counts(source: str) -> tuple[list[int], list[int]]:
    with (LENGTHS / source).open() as file:
        rows = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(file)]
    return [length for length, _ in rows], [count for _, count in rows]


def _tokens(ids: Ids, *dims: int) -> torch.Tensor:
    return ids(990, *dims) + 5  # clear of every model's special tokens


def _classified(ids: Ids, rows: int, lengths: tuple[int, ...]) -> Batch:
    return {"input_ids": _tokens(ids, rows, *lengths), "labels": ids(2, rows)}


def _choices(ids: Ids, rows: int, lengths: tuple[int, ...]) -> Batch:
    return {"input_ids": _tokens(ids, rows, 4, *lengths), "labels": ids(4, rows)}


def _spans(ids: Ids, rows: int, lengths: tuple[int, ...]) -> Batch:
    (length,) = lengths
    positions = ids(length, 2, rows)
    return {
        "input_ids": _tokens(ids, rows, length),
        "start_positions": positions[0],
        "end_positions": positions[1],
    }


def _language(ids: Ids, rows: int, lengths: tuple[int, ...]) -> Batch:
    tokens = _tokens(ids, rows, *lengths)
    return {"input_ids": tokens, "labels": tokens}


def _translated(ids: Ids, rows: int, lengths: tuple[int, ...]) -> Batch:
    source, target = lengths
    return {"input_ids": _tokens(ids, rows, source), "labels": _tokens(ids, rows, target)}


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("MC-Roberta", 16, ("swag_roberta.csv",), models.roberta_chooser, _choices),
        Task(
            "QA-XLNet",
            16,
            ("squad_xlnet.csv",),
            models.xlnet_reader,
            _spans,
            attentions=("eager",),
        ),
        Task("QA-Bert", 12, ("squad_bert.csv",), models.bert_reader, _spans),
        Task("TC-Bert", 32, ("qqp_bert.csv",), models.bert_classifier, _classified),
        Task(
            "SFT-Llama",
            8,
            ("instruct_cl100k.csv",),
            models.llama,
            _language,
            precision="bf16",
            attention="sdpa",
            longest=4096,
        ),
        # Two real distributions, though not of one data set: a reader's input, a sentence out.
        Task("T5-base", 16, ("squad_bert.csv", "swag_roberta.csv"), models.t5_base, _translated),
    )
}
