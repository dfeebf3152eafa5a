"""Budgets by measurement: how far a plain training rises, and a share of that."""

from __future__ import annotations

import gc
from collections.abc import Callable

import loops


def live_bytes() -> int:
    gc.collect()
    with loops.counted() as counter:
        return counter.in_use


def rise_of(run: Callable[[], object]) -> int:
    """How far `run` goes above what was in use before it."""
    before = live_bytes()
    with loops.counted() as counter:
        run()
        return counter.peak - before


def budget_for(rise_bytes: int, share: float) -> int:
    """What is in use now, and that share of the rise."""
    return live_bytes() + int(share * rise_bytes)
