"""The link between a device and host memory."""

from __future__ import annotations

from typing import NamedTuple

from mimose.costs.options import Option

_MARGIN = 1.1
"""The time of a copy in plans, as a multiple of what the link needs: a small error in a time should
not make the device wait."""


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

    def nanoseconds_to_host(self, moved_bytes: int) -> int:
        """The time of a copy to the host in plans."""
        return int(moved_bytes * _MARGIN / self.to_host)

    def bytes_to_host(self, nanoseconds: int) -> int:
        """What a copy to the host moves in this time, in plans."""
        return int(nanoseconds * self.to_host / _MARGIN)

    def nanoseconds_from_host(self, moved_bytes: int) -> int:
        """The time of a copy back in plans."""
        return int(moved_bytes * _MARGIN / self.from_host)
