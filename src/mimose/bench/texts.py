"""Batches of texts: padded to the longest of samples whose lengths are drawn from real data."""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, final

import torch

from mimose.bench.batches import LENGTHS, Batch, BatchShape, RandomTensors, Source, spread

_SMALLER = 2
"""By how much lengths are divided for small models."""
_LENGTHS = 16
_PAIRS = 24
"""How many lengths are observed; how many pairs of source and target."""


@final
@dataclass(frozen=True, slots=True)
class Texts(Source):
    """Texts, or pairs of source and target, of the lengths in these files."""

    files: tuple[str, ...]
    cut: int = 512
    """The length at which texts are cut."""
    axis: ClassVar[str] = "padded length"
    sides: ClassVar[int] = 1

    def draw(self, random: Random, rows: int, *, small: bool) -> BatchShape:
        drawn = (max(random.choices(*_counts(file), k=rows)) for file in self.files)
        return BatchShape(rows, tuple(self._cut(length, small) for length in drawn))

    def largest(self, shapes: Sequence[BatchShape]) -> BatchShape:
        columns = zip(*(shape.lengths for shape in shapes), strict=True)
        return BatchShape(shapes[0].rows, tuple(max(column) for column in columns))

    def longest(self, rows: int, *, small: bool) -> BatchShape:
        tables = (_counts(file) for file in self.files)
        return BatchShape(rows, tuple(self._cut(max(lengths), small) for lengths, _ in tables))

    def samples(self, shapes: Sequence[BatchShape], count: int | None = None) -> list[BatchShape]:
        columns = list(zip(*(shape.lengths for shape in shapes), strict=True))
        counts = (count or _LENGTHS,) if len(columns) == 1 else _grid(count or _PAIRS)
        axes = [spread(min(c), max(c), n) for c, n in zip(columns, counts, strict=True)]
        return [BatchShape(shapes[0].rows, lengths) for lengths in itertools.product(*axes)]

    def extent(self, lengths: Sequence[int]) -> float:
        return lengths[0]

    def elements(self, shape: BatchShape) -> int:
        return shape.rows * sum(shape.lengths)

    def _cut(self, length: int, small: bool) -> int:
        length = min(length, self.cut)
        return max(4, length // _SMALLER) if small else length


def _grid(count: int) -> tuple[int, int]:
    """So many pairs as sources times targets, half as many sources again as targets."""
    targets = math.isqrt(count * 2 // 3)
    return count // targets, targets


@functools.cache
def _counts(file: str) -> tuple[list[int], list[int]]:
    with (LENGTHS / file).open() as opened:
        rows = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(opened)]
    return [length for length, _ in rows], [count for _, count in rows]


def _tokens(random: RandomTensors, *dims: int) -> torch.Tensor:
    return random.integers(990, *dims) + 5  # clear of every model's special tokens


def classified(random: RandomTensors, shape: BatchShape) -> Batch:
    """Texts with a class each."""
    return {
        "input_ids": _tokens(random, shape.rows, *shape.lengths),
        "labels": random.integers(2, shape.rows),
    }


def choices(random: RandomTensors, shape: BatchShape) -> Batch:
    """Four endings for each text, of which one is right."""
    return {
        "input_ids": _tokens(random, shape.rows, 4, *shape.lengths),
        "labels": random.integers(4, shape.rows),
    }


def spans(random: RandomTensors, shape: BatchShape) -> Batch:
    """Texts in which an answer starts and ends somewhere."""
    (length,) = shape.lengths
    positions = random.integers(length, 2, shape.rows)
    return {
        "input_ids": _tokens(random, shape.rows, length),
        "start_positions": positions[0],
        "end_positions": positions[1],
    }


def continued(random: RandomTensors, shape: BatchShape) -> Batch:
    """Texts whose every token is to be predicted."""
    tokens = _tokens(random, shape.rows, *shape.lengths)
    return {"input_ids": tokens, "labels": tokens}


def translated(random: RandomTensors, shape: BatchShape) -> Batch:
    """Texts with a text for each."""
    source, target = shape.lengths
    return {
        "input_ids": _tokens(random, shape.rows, source),
        "labels": _tokens(random, shape.rows, target),
    }
