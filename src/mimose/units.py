"""Memory budgets as users write them, converted to bytes."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import SupportsIndex

from mimose.errors import BudgetError

GIB = 1 << 30
MIB = 1 << 20
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
    "PB": 10**15,
    "PIB": 1 << 50,
}
_INTENDED_UNITS = {"": "GiB", **{letter: f"{letter}iB" for letter in "KMGTP"}}
"""The probable unit by first letter, for inputs such as 6G, 6Gi or 6 gigs."""
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z%]*)\s*\Z")
_SMALLEST, _LARGEST = 1 << 20, 1 << 60
_MOST_GIB = 4096
"""A smaller number without a unit is probably meant in GiB."""
_SIZES = '"6GiB", "512MiB", "6GB"'
EXAMPLES = f'{_SIZES}, "80%", "auto", or a number of bytes'
"""What to write for a budget, as messages of this module end."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget: a number of bytes, a share of the device, or "auto" if both are None."""

    total_bytes: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        if self.total_bytes is not None:
            return text_of(self.total_bytes)
        return "auto" if self.share is None else f"{100 * self.share:g}% of the device"

    def in_bytes(self, *, device_bytes: int, free_bytes: int, own_bytes: int) -> int:
        """The bytes that this process may hold on such a device.

        "auto" is what the process already holds plus what is free, minus 2 % of the device as a
        margin for other processes.
        """
        if self.total_bytes is not None:
            return self.total_bytes
        if self.share is not None:
            return int(self.share * device_bytes)
        return max(own_bytes, own_bytes + free_bytes - device_bytes // 50)


def parse_budget(budget: SupportsIndex | str | float) -> Budget:
    """Parse a budget.

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
        number = operator.index(budget)  # also accepts numpy integers
    except TypeError:
        number = None
    if number is None or isinstance(budget, bool):
        raise BudgetError(f"memory_budget={budget!r} is not a memory size; use {EXAMPLES}")
    return _parse_bytes(number, repr(budget))


def typed_budget(text: str, option: str = "--budget") -> Budget:
    """Parse a budget from a command line, where digits without a unit are bytes."""
    digits = text.isdecimal() and len(text) < 20
    try:
        return parse_budget(int(text) if digits else text)
    except BudgetError as error:
        raise BudgetError(str(error).replace("memory_budget=", f"{option} ", 1)) from None


def typed_bytes(text: str, option: str = "--budget") -> int:
    """Parse a budget from a command line that knows no device: bytes, no share of a device."""
    try:
        total = typed_budget(text, option).total_bytes
    except BudgetError as error:
        raise BudgetError(str(error).replace(EXAMPLES, f"{_SIZES}, or a number of bytes")) from None
    if total is None:
        raise BudgetError(
            f"{option} {text!r}: a percentage or auto needs a device; give bytes, such as 6GiB"
        )
    return total


def _parse_float(budget: float) -> Budget:
    if not (math.isfinite(budget) and budget > 0):
        raise BudgetError(f"memory_budget={budget!r} is not a positive size; use {EXAMPLES}")
    if budget <= 1:
        hint = f'"{100 * budget:g}%"'
    elif not budget.is_integer():
        hint = _intended(budget)
    else:
        return _parse_bytes(int(budget), repr(budget))
    raise BudgetError(f"memory_budget={budget!r} has no unit; did you mean {hint}?")


def _parse_bytes(number: int, shown: str) -> Budget:
    if 0 < number < _SMALLEST:
        raise BudgetError(
            f"memory_budget={shown} means {number} bytes, below the minimum of 1 MiB; did you mean "
            f"{_intended(number)}?"
        )
    return _bytes(number, shown)


def _intended(number: float) -> str:
    """What a number without a unit probably means: GiB if small, bytes if large."""
    if number < _MOST_GIB:
        return f'"{number:.15g}GiB"'
    if number < _SMALLEST:
        return f'"{text_of(_SMALLEST)}"'
    return f'{int(number)}, without quotes, or "{text_of(number)}"'


def _parse_text(text: str) -> Budget:
    if text.strip().lower() == "auto":
        return Budget()
    match = _NUMBER.match(text)
    if match is None:
        raise BudgetError(f"memory_budget={text!r} is not a memory size; use {EXAMPLES}")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise BudgetError(f"memory_budget={text!r}: a percentage lies between 0% and 100%")
        return Budget(share=number / 100)
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise BudgetError(f"memory_budget={text!r} {_unit_problem(match[1], unit)}")
    return _bytes(number * factor, repr(text))


def _unit_problem(digits: str, unit: str) -> str:
    problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
    if not unit and _SMALLEST <= float(digits) <= _LARGEST:
        intended = _intended(float(digits))
    elif unit[:1].upper() in _INTENDED_UNITS:
        intended = digits + _INTENDED_UNITS[unit[:1].upper()]
    else:
        return f"{problem}; use {EXAMPLES}"
    return f"{problem}; did you mean {intended}? Use {EXAMPLES}"


def _bytes(number: float, shown: str) -> Budget:
    if number < _SMALLEST:
        raise BudgetError(f"memory_budget={shown} is below the minimum of 1 MiB; use {EXAMPLES}")
    if number > _LARGEST:
        raise BudgetError(f"memory_budget={shown} is more than any device has; use {EXAMPLES}")
    return Budget(total_bytes=int(number))


def text_of(number_of_bytes: float) -> str:
    """Format a number of bytes.

    >>> text_of(3 * 2**29)
    '1.50 GiB'
    """
    size = abs(number_of_bytes)
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit - unit / 2048:  # else it would round to 1024 of the smaller unit
            return f"{number_of_bytes / unit:.{2 if size < 100 * unit else 0}f} {name}"
    return f"{number_of_bytes:.0f} B"
