"""When bytes that wait in host memory leave the device, and when they come back."""

from __future__ import annotations

from typing import NamedTuple


class Transfer(NamedTuple):
    """One run of a plan whose bytes wait in host memory between its forward and its backward."""

    run: int
    """Its index in the plan."""
    moved_bytes: int
    release_before: int
    """The run before whose forward the bytes leave the device; the number of runs, if that is after
    the last forward."""
    prefetch_at: int
    """The run at whose backward they are fetched: this run, or a later one."""
