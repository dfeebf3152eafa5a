"""Budgets as people write them, in bytes."""

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
    "PB": 10**15,
    "PIB": 1 << 50,
}
_LIKELY = {"": "GiB", **{letter: f"{letter}iB" for letter in "KMGTP"}}
"""What people mean by a unit that begins so: 6G, 6Gi, 6 gigs."""
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

    def __str__(self) -> str:
        if self.total_bytes is not None:
            return text_of(self.total_bytes)
        return "what is free" if self.share is None else f"{100 * self.share:g}% of the device"

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


def typed_budget(text: str, option: str = "--budget") -> Budget:
    """Bytes as they are typed on a command line, for this option: digits alone are bytes."""
    try:
        return parse_budget(int(text) if text.isdecimal() else text)
    except BudgetError as error:
        raise BudgetError(str(error).replace("memory_budget=", f"{option} ", 1)) from None


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
        likely = _meant(number) if large else match[1] + _LIKELY.get(unit[:1].upper(), "")
        meant = f"did you mean {likely}? " if large or unit[:1].upper() in _LIKELY else ""
        raise BudgetError(f"memory_budget={text!r} has no known unit: {meant}Write {_EXAMPLES}")
    return _bytes(number * factor, repr(text))


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
