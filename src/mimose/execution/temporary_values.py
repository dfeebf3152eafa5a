"""Replace dict entries (buffers, parameters, attributes of modules) while a function runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Entry = tuple[dict[str, Any], str, Any]
"""A dict, a key, and a value."""
ABSENT: Any = object()
"""Stands for an entry that does not exist."""


def run_with(entries: Sequence[Entry], function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with these entries set, then restore the present ones."""
    present = [(table, key, table.get(key, ABSENT)) for table, key, _ in entries]
    try:
        for entry in entries:
            put(*entry)
        return function(*args)
    finally:
        for entry in present:
            put(*entry)


def run_with_former(entries: Iterable[Entry], function: Callable[..., Any], *args: Any) -> Any:
    """The same for entries that most tables still have; only others are replaced."""
    replaced = [entry for entry in entries if entry[0].get(entry[1], ABSENT) is not entry[2]]
    return run_with(replaced, function, *args) if replaced else function(*args)


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry, or delete it if the value is ABSENT."""
    if value is ABSENT:
        table.pop(key, None)
    else:
        table[key] = value
