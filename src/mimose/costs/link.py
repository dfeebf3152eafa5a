"""The link between a device and host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

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

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        options = [option.value for option in Option if option in self.options]
        return {**self._asdict(), "options": options}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Link:
        """The link that `to_plain` gave; raises if that is damaged."""
        link = cls(
            float(plain["to_host"]),
            float(plain["from_host"]),
            int(plain["host_bytes"]),
            frozenset(map(Option, plain["options"])),
        )
        if not (0 < link.to_host < math.inf and 0 < link.from_host < math.inf):
            raise ValueError(f"{plain} has a speed that is not positive")
        if link.host_bytes < 0:
            raise ValueError(f"{plain} has a negative number of bytes")
        return link

    def nanoseconds_to_host(self, moved_bytes: int) -> int:
        """The time of a copy to the host in plans."""
        return int(moved_bytes * _MARGIN / self.to_host)

    def bytes_to_host(self, nanoseconds: int) -> int:
        """What a copy to the host moves in this time, in plans."""
        return int(nanoseconds * self.to_host / _MARGIN)

    def nanoseconds_from_host(self, moved_bytes: int) -> int:
        """The time of a copy back in plans."""
        return int(moved_bytes * _MARGIN / self.from_host)
