"""When bytes that wait in host memory leave the device, and when they come back.

All copies share one stream, first in, first out. A copy to the host begins when its run's forward
is over and the link is free. The bytes leave the device before the first forward that starts after
the copy, so that no forward waits. If that is none, the device waits after the last forward.

Copies back are made in the order in which backwards need them, each as late as possible, so that
the bytes are back on the device for a short time only. A copy is queued when the backward of some
run begins: the last such moment that is early enough. If even the first is too late, the device
waits for the rest of the copy.

Copies are taken to be slower than the link by a margin (`link.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mimose.costs.link import Link


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


class Schedule(NamedTuple):
    """The transfers of a plan, and how long the device waits for them."""

    transfers: tuple[Transfer, ...]
    stall_nanoseconds: int


NO_TRANSFERS = Schedule((), 0)


def schedule(
    link: Link,
    moved: Sequence[tuple[int, int]],
    forward_nanoseconds: Sequence[int],
    backward_nanoseconds: Sequence[int],
) -> Schedule:
    """When to move the bytes of these runs: (index, bytes) in forward order.

    The times are those of every run of the step.
    """
    releases, after_forwards = _releases(link, moved, forward_nanoseconds)
    prefetches, before_backwards = _prefetches(link, moved, backward_nanoseconds)
    transfers = [
        Transfer(run, size, release, prefetch)
        for (run, size), release, prefetch in zip(moved, releases, prefetches, strict=True)
    ]
    return Schedule(tuple(transfers), after_forwards + before_backwards)


def _releases(
    link: Link, moved: Sequence[tuple[int, int]], took: Sequence[int]
) -> tuple[list[int], int]:
    """The run before which each leaves the device; and how long the device waits for the last."""
    starts = [0, *accumulate(took)]
    free, releases = 0, []
    for run, size in moved:
        begins = starts[run + 1]
        free = (free if free > begins else begins) + link.nanoseconds_to_host(size)
        releases.append(bisect_left(starts, free, run + 1, len(took)))
    return releases, max(0, free - starts[-1])


def _prefetches(
    link: Link, moved: Sequence[tuple[int, int]], took: Sequence[int]
) -> tuple[list[int], int]:
    """The run at whose backward each is fetched; and how long the backwards wait in all."""
    last, whole = len(took) - 1, sum(took)
    ends = list(accumulate(took))
    latest, prefetches = whole, []
    for run, size in moved:  # the first run is fetched last
        begins = whole - ends[run]
        latest = (latest if latest < begins else begins) - link.nanoseconds_from_host(size)
        # Of all backwards that begin no later than that, the one that begins last.
        prefetches.append(min(last, bisect_left(ends, whole - latest, run)))
    return prefetches, max(0, -latest)
