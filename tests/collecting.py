"""Garbage collection where it is asked for often."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def swift() -> Iterator[None]:
    """Collections pass over what was there before: each recovery of a step needs one."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
