"""Describe many blocks in a short text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mimose.interception.blocks import Block

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST_LISTED = 4


def name_pattern(names: Sequence[str]) -> str:
    """Merge names that differ only in their numbers, with `*` for the numbers.

    If numbers are left out, the others are given by name.

    >>> name_pattern(["inc", "encoder.layer.0", "encoder.layer.1", "decoder.7"])
    'inc, encoder.layer.*, decoder.7'
    >>> name_pattern(["layers.1", "layers.2", "layers.3"])
    'layers.1 … layers.3'
    """
    merged: dict[str, list[str]] = {}
    for name in names:
        merged.setdefault(_NUMBER.sub("*", name), []).append(name)
    return _first(text for pattern, same in merged.items() for text in _merged(pattern, same))


def _merged(pattern: str, names: list[str]) -> list[str]:
    """Names of one pattern as few words."""
    if len(names) == 1:
        return names
    numbers = [int(number[0]) for name in names for number in _NUMBER.finditer(name)]
    if pattern.count("*") > 1 or sorted(numbers) == list(range(len(names))):
        return [pattern]
    if numbers == list(range(numbers[0], numbers[0] + len(names))):
        return [f"{names[0]} … {names[-1]}"]
    return names


def describe_blocks(blocks: Sequence[Block]) -> str:
    """The number of blocks, their names and their classes.

    >>> from torch import nn
    >>> describe_blocks([Block(f"layers.{i}", nn.Linear(1, 1)) for i in range(3)])
    '3 blocks layers.* (Linear)'
    """
    classes = _first(dict.fromkeys(type(block.module).__name__ for block in blocks))
    number = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
    return f"{number} {name_pattern([block.name for block in blocks])} ({classes})"


def _first(words: Iterable[str]) -> str:
    listed = list(words)
    more = len(listed) - _MOST_LISTED
    return ", ".join(listed if more <= 0 else [*listed[:_MOST_LISTED], f"and {more} more"])
