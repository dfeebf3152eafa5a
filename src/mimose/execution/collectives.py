"""Which other processes take part in what runs here."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def several() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Spoken:
    """Which other ranks this one has spoken to since: it counts the collectives of each group."""

    def __init__(self) -> None:
        self._before = _issued() if several() else {}

    def to(self) -> frozenset[int]:
        """The ranks, this one included, of all groups in which a collective was issued since."""
        if not several():
            return frozenset()
        now = _issued().items()
        moved = [g for g, count in now if count is None or count != self._before.get(g, 0)]
        return frozenset(rank for g in moved for rank in dist.get_process_group_ranks(g))


def _issued() -> dict[Any, int | None]:
    return {group: _count(group) for group in list(dist.distributed_c10d._world.pg_map)}


def _count(group: Any) -> int | None:
    """Collectives issued so far, by all backends of the group; None if one does not count."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except RuntimeError:
        return None
