"""The link between a device and host memory."""

from __future__ import annotations

from typing import NamedTuple

from mimose.costs.options import Option


class Link(NamedTuple):
    """How fast bytes move between device and host, and how many may wait there."""

    to_host: float
    """Bytes per nanosecond."""
    from_host: float
    """Bytes per nanosecond."""
    host_bytes: int
    """What plans may hold in host memory."""
    options: frozenset[Option] = frozenset(Option)
    """The options that plans may use."""
