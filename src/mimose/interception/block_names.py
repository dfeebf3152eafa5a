"""The names of many blocks in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mimose.interception.blocks import Block

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST = 4


def pattern_of(names: Sequence[str]) -> str:
    """Names that differ in their numbers only become one, with `*` for the numbers.

    >>> pattern_of(["inc", "encoder.layer.0", "encoder.layer.1", "decoder.7"])
    'inc, encoder.layer.*, decoder.7'
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    return _first(pattern if len(same) > 1 else same[0] for pattern, same in alike.items())


def described(blocks: Sequence[Block]) -> str:
    """How many there are, how they are called and of which classes they are.

    >>> from torch import nn
    >>> described([Block(f"layers.{i}", nn.Linear(1, 1)) for i in range(3)])
    '3 blocks layers.* (Linear)'
    """
    classes = _first(dict.fromkeys(type(block.module).__name__ for block in blocks))
    number = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
    return f"{number} {pattern_of([block.name for block in blocks])} ({classes})"


def _first(words: Iterable[str]) -> str:
    listed = list(words)
    more = len(listed) - _MOST
    return ", ".join(listed if more <= 0 else [*listed[:_MOST], f"and {more} more"])
