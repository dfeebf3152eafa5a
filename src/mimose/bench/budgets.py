"""Budgets: in bytes, as a share of the way between the paper's two stars, or by how tight.

The stars are the peaks of the largest size with everything recomputed and with everything kept. A
budget is `tight` by so many percent if plain training would exceed it on so many percent of the
steps: that compares tasks fairly. None is below 1.05 times what recomputing everything needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.bench.extras import BenchError
from mimose.bench.survey import Survey
from mimose.costs import InputSize
from mimose.errors import BudgetError
from mimose.units import text_of, typed_bytes

_ABOVE_NEEDED = 1.05


@dataclass(frozen=True, slots=True)
class Limit:
    """A budget for one task, and how it was asked for."""

    label: str
    total_bytes: int
    at_floor: bool = False

    def __str__(self) -> str:
        return f"{self.label} ({text_of(self.total_bytes)}{', the floor' if self.at_floor else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Budgets as the command line has them."""

    total: Sequence[str] = ()
    between: Sequence[float] = ()
    tight: Sequence[float] = ()

    def __post_init__(self) -> None:
        for text in self.total:
            _bytes_of(text)
        if any(not 0 <= share <= 1 for share in self.between):
            raise BenchError("--between takes shares from 0 (all recomputed) to 1 (all kept)")
        if any(not 0 <= percent <= 100 for percent in self.tight):
            raise BenchError("--tight takes percentages of steps, from 0 to 100")


def floor_bytes(survey: Survey) -> int:
    """The smallest budget that is worth running."""
    return int(_ABOVE_NEEDED * survey.needed_bytes)


def limits(survey: Survey, sizes: Sequence[InputSize], asked: Asked) -> list[Limit]:
    """The budgets of a task, without repetition and without bytes below the floor."""
    floor = floor_bytes(survey)
    found = [Limit(text, number) for text, number in _in_bytes(asked) if number >= floor]
    low, high = survey.needed_bytes, survey.kept_bytes(survey.largest)
    found += [
        _raised(f"between {share:g}", int(low + share * (high - low)), floor)
        for share in asked.between
    ]
    peaks = [survey.kept_bytes(size) for size in sizes]
    found += [
        _raised(f"tight {percent:g}", int(np.percentile(peaks, 100 - percent)), floor)
        for percent in asked.tight
    ]
    return list({limit.total_bytes: limit for limit in reversed(found)}.values())[::-1]


def too_small(survey: Survey, asked: Asked) -> list[str]:
    """Budgets in bytes that are below the task's floor; refused if all in bytes are."""
    floor = floor_bytes(survey)
    below = [text for text, number in _in_bytes(asked) if number < floor]
    if below and len(below) == len(asked.total):
        raise BenchError(
            f"budget {', '.join(below)} is below the floor of {survey.task}: with every block "
            f"recomputed its largest batch needs {text_of(survey.needed_bytes)}, and 1.05 times "
            f"that is {text_of(floor)}. Raise --budget to it"
        )
    return below


def _in_bytes(asked: Asked) -> Iterator[tuple[str, int]]:
    for text in asked.total:
        yield text, _bytes_of(text)


def _bytes_of(text: str) -> int:
    try:
        return typed_bytes(text)
    except BudgetError as error:
        raise BenchError(str(error)) from error


def _raised(label: str, number: int, floor: int) -> Limit:
    return Limit(label, max(number, floor), number < floor)
