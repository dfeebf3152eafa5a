"""Budgets as people write them, in bytes; and the reserve that a plan leaves free."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import SupportsIndex

from mimose.errors import BudgetError

GIB = 1 << 30
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z%]*)\s*\Z")
_SMALLEST, _LARGEST = 1 << 20, 1 << 60
_EXAMPLES = '"6GiB", "512MiB", "6GB", "80%", "auto", or bytes as a whole number'


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as it was asked for: so many bytes, or a share of the device, or what is free."""

    total_bytes: int | None = None
    share: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.total_bytes is None and self.share is None

    def in_bytes(self, *, device_bytes: int, free_bytes: int, own_bytes: int) -> int:
        """The bytes that this process may hold, on a device of which so much is free.

        "auto" is what the process holds already plus what is free, less a margin for what others
        on the device may still take: 2 % of the device.
        """
        if self.total_bytes is not None:
            return self.total_bytes
        if self.share is not None:
            return int(self.share * device_bytes)
        return max(own_bytes, own_bytes + free_bytes - device_bytes // 50)


def parse_budget(budget: SupportsIndex | str | float) -> Budget:
    """Read a budget.

    >>> parse_budget("6GiB").total_bytes == 6 * 2**30
    True
    >>> parse_budget("80%").share
    0.8
    """
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, float):
        return _parse_float(budget)
    try:
        number = operator.index(budget)  # also numpy's whole numbers
    except TypeError:
        number = None
    if number is None or isinstance(budget, bool):
        raise BudgetError(f"memory_budget={budget!r}: write {_EXAMPLES}")
    return _parse_bytes(number, repr(budget))


def _parse_float(budget: float) -> Budget:
    if not (math.isfinite(budget) and budget > 0):
        raise BudgetError(f"memory_budget={budget!r} cannot be: write {_EXAMPLES}")
    if budget <= 1:
        hint = f'"{100 * budget:g}%"'
    elif not budget.is_integer():
        hint = _meant(budget)
    else:
        return _parse_bytes(int(budget), repr(budget))
    raise BudgetError(f"memory_budget={budget!r} has no unit: did you mean {hint}?")


def _parse_bytes(number: int, shown: str) -> Budget:
    if 0 < number < _SMALLEST:
        raise BudgetError(
            f"memory_budget={shown} bytes is next to nothing: did you mean {_meant(number)}?"
        )
    return _bytes(number, shown)


def _meant(number: float) -> str:
    """What a number without a unit probably stands for: so large a one for bytes."""
    if number < _SMALLEST:
        return f'"{number:.15g}GiB"'
    return f'{int(number)}, without quotes, or "{text_of(number)}"'


def _parse_text(text: str) -> Budget:
    if text.strip().lower() == "auto":
        return Budget()
    match = _NUMBER.match(text)
    if match is None:
        raise BudgetError(f"memory_budget={text!r} cannot be read: write {_EXAMPLES}")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise BudgetError(f"memory_budget={text!r}: a share lies between 0% and 100%")
        return Budget(share=number / 100)
    factor = _UNITS.get(unit.upper())
    if factor is None:
        large = not unit and _SMALLEST <= number <= _LARGEST
        hint = f"did you mean {_meant(number) if large else match[1] + _likely(unit)}?"
        raise BudgetError(f"memory_budget={text!r} has no known unit: {hint} Write {_EXAMPLES}")
    return _bytes(number * factor, repr(text))


def _likely(unit: str) -> str:
    return {"G": "GiB", "M": "MiB", "T": "TiB", "K": "KiB", "GI": "GiB"}.get(unit.upper(), "GiB")


def _bytes(number: float, shown: str) -> Budget:
    if number < _SMALLEST:
        raise BudgetError(f"memory_budget={shown} is under 1 MiB: write {_EXAMPLES}")
    if number > _LARGEST:
        raise BudgetError(f"memory_budget={shown} is more than any device has: write {_EXAMPLES}")
    return Budget(total_bytes=int(number))


def text_of(number_of_bytes: float) -> str:
    """Bytes for people.

    >>> text_of(3 * 2**29)
    '1.50 GiB'
    """
    size = abs(number_of_bytes)
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{number_of_bytes / unit:.{2 if size < 100 * unit else 0}f} {name}"
    return f"{number_of_bytes:.0f} B"


class Reserve:
    """The part of the budget that plans leave free, learned while training.

    The allocator holds more than is in use: rounding, fragments between tensors of varying size,
    workspaces. How much cannot be known in advance. The reserve starts at 3 % of the budget, or at
    the holes that the allocator's pages may leave, where these are more (but not over 5 %). When a
    step near the limit makes the allocator take more from the device, what it then holds beyond
    what is in use is evidence, and so it is in observed steps; when memory ran out, plans were too
    tight. That it had to give cached memory back before it could go on costs next to nothing, but
    near the limit it warns: where the reserve did not grow with it, memory ran out sooner or later.
    Without a sign over many steps near the limit the reserve shrinks to where it started. Where the
    allocator leaves fragments it may grow to a quarter of the budget, and every retry counts, twice
    as much; where it does not, to 8 %. Only running out of memory makes it grow further.
    """

    _FIRST, _PATIENCE, _A_RETRY = 0.03, 50, 0.0025

    def __init__(self, budget_bytes: int, *, fragments: bool = False, hole_bytes: int = 0) -> None:
        self._budget = budget_bytes
        self._least = int(min(max(self._FIRST * budget_bytes, hole_bytes), 0.05 * budget_bytes))
        self._most = budget_bytes // 4 if fragments else max(self._least, int(0.08 * budget_bytes))
        self._most_by_growth = self._most if fragments else self._least
        self._fragments = fragments
        self.bytes = self._least
        self._quiet_steps = 0

    def near_limit(self, peak_bytes: int) -> bool:
        """Whether a step's peak was high enough to learn from."""
        return peak_bytes >= 0.98 * (self._budget - self.bytes)

    def ran_out(self) -> None:
        """The allocator has run out of memory in a step: the plans left too little."""
        more = self.bytes + self._budget // 100
        self._most = min(max(self._most, more), self._budget // 4)
        self._set(more)

    def learn_unusable(self, number_of_bytes: int) -> None:
        """An observed step made the allocator hold so much more than was ever in use."""
        if number_of_bytes > self.bytes:
            self._set(number_of_bytes)

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        """A step peaked at `peak_bytes` in use while the allocator held `held_bytes`."""
        near = self.near_limit(peak_bytes)
        if retries and (near or self._fragments):
            share = retries * self._A_RETRY * (2 if self._fragments else 1)
            self._set(self.bytes + int(share * self._budget))
        elif not near:
            return
        elif grew and held_bytes - peak_bytes > self.bytes:
            self._set(max(self.bytes, min(held_bytes - peak_bytes, self._most_by_growth)))
        else:
            self._quiet_steps += 1
            if self._quiet_steps >= self._PATIENCE:
                self._set(int(0.9 * self.bytes))

    def _set(self, number: int) -> None:
        self.bytes = min(max(number, self._least), self._most)
        self._quiet_steps = 0
