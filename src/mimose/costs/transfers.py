"""Schedule transfers: when bytes are released on the device, and when they are fetched again.

All copies run on one stream, first in, first out. A copy to the host begins when its run's forward
has ended and the link is free. Its bytes are released just before the first forward that starts
after the copy, so no forward waits. If there is none, the device waits after the last forward.

Copies from the host run in the order in which the backwards need them, each as late as possible, so
that the bytes are on the device for a short time only. A copy is queued when the backward of some
run begins: the latest such moment that is early enough. If even the first backward is too late, the
device waits for the rest of the copy.

A margin on the time of copies covers errors in the predicted times (`link.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mimose.costs.link import Link


class Transfer(NamedTuple):
    """The transfer of one run's bytes to the host and back."""

    run: int
    """The run's index in the plan."""
    moved_bytes: int
    release_before: int
    """The bytes are released before the forward of this run; the number of runs stands for after
    the last forward."""
    prefetch_at: int
    """The bytes are fetched when the backward of this run begins: `run`, or a later one."""


class Schedule(NamedTuple):
    """The transfers of a plan, and the time that the device waits for them."""

    transfers: tuple[Transfer, ...]
    stall_nanoseconds: int


NO_TRANSFERS = Schedule((), 0)


def schedule(
    link: Link,
    moved: Sequence[tuple[int, int]],
    forward_nanoseconds: Sequence[int],
    backward_nanoseconds: Sequence[int],
) -> Schedule:
    """Schedule the transfers of `moved`, pairs of a run's index and its bytes in forward order.

    `forward_nanoseconds` and `backward_nanoseconds` are the times of all runs of the step.
    """
    releases, forward_stall = _releases(link, moved, forward_nanoseconds)
    prefetches, backward_stall = _prefetches(link, moved, backward_nanoseconds)
    transfers = [
        Transfer(run, size, release, prefetch)
        for (run, size), release, prefetch in zip(moved, releases, prefetches, strict=True)
    ]
    return Schedule(tuple(transfers), forward_stall + backward_stall)


def _releases(
    link: Link, moved: Sequence[tuple[int, int]], durations: Sequence[int]
) -> tuple[list[int], int]:
    """The `release_before` of each transfer, and the time that the device waits for the last."""
    starts = [0, *accumulate(durations)]
    link_free_at, releases = 0, []
    for run, size in moved:
        forward_ends = starts[run + 1]
        link_free_at = max(link_free_at, forward_ends) + link.nanoseconds_to_host(size)
        releases.append(bisect_left(starts, link_free_at, run + 1, len(durations)))
    return releases, max(0, link_free_at - starts[-1])


def _prefetches(
    link: Link, moved: Sequence[tuple[int, int]], durations: Sequence[int]
) -> tuple[list[int], int]:
    """The `prefetch_at` of each transfer, and the time that the backwards wait in all."""
    last, total = len(durations) - 1, sum(durations)
    ends = list(accumulate(durations))
    copy_starts, prefetches = total, []
    for run, size in moved:  # from the last copy to the first: the first run is fetched last
        backward_starts = total - ends[run]
        copy_starts = min(copy_starts, backward_starts) - link.nanoseconds_from_host(size)
        # The last of all backwards that begin before the copy has to start.
        prefetches.append(min(last, bisect_left(ends, total - copy_starts, run)))
    return prefetches, max(0, -copy_starts)
