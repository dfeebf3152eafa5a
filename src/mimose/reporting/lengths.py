"""How long inputs are: a distribution as people write it, and what batches make of it."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from pathlib import Path

from mimose.errors import ArgumentError

_HOW = (
    'write "128", "64,128,256", "24-256", or a file of lengths, one a line (length or length,count)'
)


def parse_lengths(text: str) -> dict[int, float]:
    """Lengths and their weights.

    >>> parse_lengths("64,128,128")
    {64: 1.0, 128: 2.0}
    """
    if Path(text).is_file():
        return _from_file(Path(text))
    weights: dict[int, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?", part)
        if match is None:
            raise ArgumentError(f"lengths {text!r} are neither numbers nor a file: {_HOW}")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 0 < low <= high:
            raise ArgumentError(f"lengths {part.strip()!r} cannot be: {_HOW}")
        for length in range(low, high + 1):
            weights[length] = weights.get(length, 0.0) + 1.0
    return weights


def _from_file(path: Path) -> dict[int, float]:
    weights: dict[int, float] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or (number == 1 and not row[0].strip().isdigit()):
                continue
            try:
                length, count = int(row[0]), float(row[1]) if len(row) > 1 else 1.0
            except ValueError:
                shown = ",".join(row)[:40]
                raise ArgumentError(
                    f"{path}, line {number}: {shown!r} is no length: {_HOW}"
                ) from None
            if length < 1 or not 0 <= count < math.inf:
                shown = ",".join(row)[:40]
                raise ArgumentError(f"{path}, line {number}: {shown!r} cannot be: {_HOW}")
            weights[length] = weights.get(length, 0.0) + count
    weights = {length: count for length, count in weights.items() if count}
    if not weights:
        raise ArgumentError(f"{path} has no lengths in it: {_HOW}")
    return weights


def padded(weights: Mapping[int, float], batch: int) -> dict[int, float]:
    """The lengths of batches that are padded to the longest of `batch` samples.

    >>> padded({1: 1, 2: 1}, batch=2)
    {1: 0.25, 2: 0.75}
    """
    total, below, shares = sum(weights.values()), 0.0, {}
    seen = 0.0
    for length in sorted(weights):
        seen += weights[length]
        upto = (seen / total) ** batch
        shares[length] = upto - below
        below = upto
    return shares
