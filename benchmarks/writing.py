"""How the pages of results write spreads, and where something was measured."""

from __future__ import annotations

from typing import Any


def where(result: dict[str, Any]) -> str:
    dirty = " (dirty)" if result.get("tree_state") == "dirty" else ""
    shared = ", beside other runs on the same device" if result.get("shared_device") else ""
    return (
        f"{result['machine']}, torch {result['torch']}, transformers {result['transformers']}, "
        f"Python {result['python']}, commit {result['commit'][:7]}{dirty}, "
        f"{result['date']}{shared}"
    )


def span(spread: dict[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """Median, with the quartiles in brackets."""
    low, middle, high = (spread[name] * scale for name in ("q1", "median", "q3"))
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
