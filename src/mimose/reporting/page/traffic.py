"""The copies between device and host in one step, at the times of its memory curve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mimose.costs import Option, Profile, costs_of, transfers_of
from mimose.reporting.page.curve import BACKWARD, FORWARD, RECOMPUTE, Moment


class Copy(NamedTuple):
    """One copy between device and host."""

    run: int
    """Index of the run whose bytes move."""
    to_host: bool
    begins: float
    """Seconds since the start of the step, as in the curve."""
    ends: float
    bytes: int


def copies(profile: Profile, choices: Sequence[Option], moments: Sequence[Moment]) -> list[Copy]:
    """The copies in a step with this curve. The link makes one copy at a time, in order."""
    link, transfers = profile.link, transfers_of(profile, costs_of(profile, choices)).transfers
    if link is None:
        return []
    forwards_end = {m.run: m.seconds for m in moments if m.phase == FORWARD}
    backwards_begin: dict[int, float] = {}
    for before, after in pairwise(moments):
        if after.phase in (RECOMPUTE, BACKWARD):
            backwards_begin.setdefault(after.run, before.seconds)
    link_free_at, made = 0.0, []
    for run, size, *_ in transfers:
        begins = max(link_free_at, forwards_end[run])
        link_free_at = begins + link.nanoseconds_to_host(size) / 1e9
        made.append(Copy(run, True, begins, link_free_at, size))
    for run, size, _, prefetch in reversed(transfers):
        begins = max(link_free_at, backwards_begin[prefetch])
        link_free_at = begins + link.nanoseconds_from_host(size) / 1e9
        made.append(Copy(run, False, begins, link_free_at, size))
    return made
