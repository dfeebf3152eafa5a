"""Distributions of input lengths, and of the padded lengths of batches."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from mimose.errors import ArgumentError

_MOST_LENGTHS = 1_000_000
"""Different lengths, and the longest length: far more than any model trains with."""
_USAGE = 'use "128", "64,128,256", "24-256", or a file with one "length" or "length,count" per line'


def parse_lengths(text: str) -> dict[int, float]:
    """Parse lengths into a weight for each length.

    >>> parse_lengths("64,128,128")
    {64: 1.0, 128: 2.0}
    """
    if Path(text).is_file():
        return _from_file(Path(text))
    weights: dict[int, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?", part)
        if match is None and re.search(r"[A-Za-z/\\]", text):
            raise ArgumentError(f"lengths {text!r}: there is no such file; {_USAGE}")
        if match is None:
            raise ArgumentError(f"lengths {text!r} are neither numbers nor a file; {_USAGE}")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 0 < low <= high:
            raise ArgumentError(f"lengths {part.strip()!r} are not a positive range; {_USAGE}")
        _refuse_too_many(high, part.strip())
        for length in range(low, high + 1):
            weights[length] = weights.get(length, 0.0) + 1.0
    return weights


def _refuse_too_many(longest: int, shown: str) -> None:
    if longest > _MOST_LENGTHS:
        raise ArgumentError(
            f"lengths {shown!r} go up to {longest:,}, but at most {_MOST_LENGTHS:,} is supported; "
            "give shorter lengths"
        )


def _from_file(path: Path) -> dict[int, float]:
    weights: dict[int, float] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, row in _rows(file, path):
            if not row or (number == 1 and not re.search(r"\d", row[0])):  # a header
                continue
            length, count = _parse_row(row, f"{path}, line {number}")
            weights[length] = weights.get(length, 0.0) + count
    weights = {length: count for length, count in weights.items() if count}
    if not math.isfinite(sum(weights.values())):
        raise ArgumentError(f"{path}: the counts add up to more than a float can hold")
    if not weights:
        raise ArgumentError(f"{path} contains no lengths; {_USAGE}")
    return weights


def _rows(file: TextIO, path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, numbered from 1."""
    try:
        yield from enumerate(csv.reader(file), 1)
    except csv.Error as error:  # a quote that is never closed, say
        raise ArgumentError(f"{path} is not a CSV file ({error}); {_USAGE}") from None


def _parse_row(row: list[str], place: str) -> tuple[int, float]:
    try:
        length, count = int(row[0]), float(row[1]) if len(row) > 1 else 1.0
    except ValueError:
        length, count = 0, 0.0
    if length < 1 or not 0 <= count < math.inf:
        shown = ",".join(row)[:40]
        raise ArgumentError(f"{place}: {shown!r} is not a positive length; {_USAGE}")
    _refuse_too_many(length, place)
    return length, count


def padded(weights: Mapping[int, float], batch: int) -> dict[int, float]:
    """The length distribution of batches padded to the longest of `batch` samples.

    >>> padded({1: 1, 2: 1}, batch=2)
    {1: 0.25, 2: 0.75}
    """
    total, shares = sum(weights.values()), {}
    weight = shorter = 0.0
    for length in sorted(weights):
        weight += weights[length]
        up_to = (weight / total) ** batch
        shares[length] = up_to - shorter
        shorter = up_to
    return shares
