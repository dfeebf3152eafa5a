"""Replace dict entries (buffers, parameters, attributes of modules) while a function runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

ABSENT: Any = object()
"""Stands for an entry that does not exist."""


def run_with(
    entries: Sequence[tuple[dict[str, Any], str, Any]], function: Callable[..., Any], *args: Any
) -> Any:
    """Call `function` with these (dict, key, value) entries set, then restore the present ones."""
    present = [(table, key, table.get(key, ABSENT)) for table, key, _ in entries]
    try:
        for entry in entries:
            put(*entry)
        return function(*args)
    finally:
        for entry in present:
            put(*entry)


def run_with_former(
    entries: Iterable[tuple[dict[str, Any], str, Any]], function: Callable[..., Any], *args: Any
) -> Any:
    """The same for entries that most tables still have; only others are replaced."""
    replaced = [entry for entry in entries if entry[0].get(entry[1], ABSENT) is not entry[2]]
    return run_with(replaced, function, *args) if replaced else function(*args)


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry, or delete it if the value is ABSENT."""
    if value is ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


class UnchangedAttributes:
    """The attributes that a forward has found and left unchanged."""

    __slots__ = ("_entries",)

    def __init__(self, entries: list[tuple[dict[str, Any], str, Any]]) -> None:
        self._entries = entries

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with these attributes, as the forward found them."""
        return run_with_former(self._entries, function, *args)
