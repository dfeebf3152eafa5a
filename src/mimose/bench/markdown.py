"""Tables in Markdown, and how budgets are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimose.units import text_of


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def limit_text(limit: dict[str, Any]) -> str:
    """A budget by what it was asked for as, and in bytes."""
    floor = " (floor)" if limit["at_floor"] else ""
    return f"{limit['label']}, {text_of(limit['total_bytes'])}{floor}"
