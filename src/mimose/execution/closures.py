"""The values that a Python function holds."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any


def values_held_by(function: types.FunctionType) -> Iterator[Any]:
    """The values of a function's closure and its defaults."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
