"""The link between a device and host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mimose.costs.options import Option

_MARGIN = 1.1
"""Plans assume that copies take this many times as long as the link needs, so that a small error in
a predicted time does not make the device wait."""


class Link(NamedTuple):
    """The speed of copies between device and host, and the host memory that plans may use."""

    to_host: float
    """Bytes per nanosecond."""
    from_host: float
    """Bytes per nanosecond."""
    host_bytes: int
    """The most bytes that a plan may hold in host memory."""
    options: frozenset[Option] = frozenset(Option)
    """The options that plans may use."""

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings and lists, for JSON."""
        options = [option.value for option in Option if option in self.options]
        return {**self._asdict(), "options": options}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Link:
        """The inverse of `to_plain`; raises a ValueError if a number is out of range."""
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
        """The time that plans assume for a copy to the host."""
        return int(moved_bytes * _MARGIN / self.to_host)

    def bytes_to_host(self, nanoseconds: int) -> int:
        """The bytes that plans assume a copy to the host moves in this time."""
        return int(nanoseconds * self.to_host / _MARGIN)

    def nanoseconds_from_host(self, moved_bytes: int) -> int:
        """The time that plans assume for a copy from the host."""
        return int(moved_bytes * _MARGIN / self.from_host)
