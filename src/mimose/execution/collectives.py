"""Find the ranks that take part in the collectives of a block."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class CollectivesIssued:
    """The collectives that this rank has issued since this object was created."""

    def __init__(self) -> None:
        self._before = _counts() if is_distributed() else {}

    def ranks(self) -> frozenset[int]:
        """The ranks, this one included, of all groups in which a collective was issued."""
        if not is_distributed():
            return frozenset()
        now = _counts().items()
        used = [g for g, count in now if count is None or count != self._before.get(g, 0)]
        return frozenset(rank for g in used for rank in dist.get_process_group_ranks(g))


def _counts() -> dict[Any, int | None]:
    return {group: _count(group) for group in list(dist.distributed_c10d._world.pg_map)}


def _count(group: Any) -> int | None:
    """How many collectives a group's backends have issued; None if a backend does not count."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except RuntimeError:
        return None
