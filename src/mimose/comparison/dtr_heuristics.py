"""Which storage DTR evicts next: one class for each heuristic of Kirisame et al., section 4.

A heuristic gives every storage a score, and the lowest score is evicted first. It is told of every
eviction and every return, so that it can keep what it knows of the evicted storages up to date.
`total_accesses` counts the storages that it looked at: the cost of planning, whatever the machine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import final

from mimose.comparison.dtr_graph import Storage


class Heuristic(ABC):
    """Scores storages; the lowest score is evicted first."""

    def __init__(self) -> None:
        self.accesses = 0

    @property
    def total_accesses(self) -> int:
        """Storages that it looked at so far."""
        return self.accesses

    @abstractmethod
    def score(self, storage: Storage, now: int, lowest: float = math.inf) -> float:
        """The cost of evicting this resident storage at this time.

        A score that must be above `lowest` may be any number above it: another storage is cheaper.
        """

    def evicted(self, storage: Storage) -> None:  # noqa: B027 - most heuristics keep nothing
        """Note that this storage was just evicted."""

    def returned(self, storage: Storage) -> None:  # noqa: B027
        """Note that this storage was just computed, for the first time or again."""


@final
class LeastRecentlyUsed(Heuristic):
    """h_LRU: what was not used for the longest time goes first."""

    def score(self, storage: Storage, now: int, lowest: float = math.inf) -> float:
        self.accesses += 1
        return storage.last_access


@final
class LargestFirst(Heuristic):
    """h_size: the largest goes first, so that few evictions are needed."""

    def score(self, storage: Storage, now: int, lowest: float = math.inf) -> float:
        self.accesses += 1
        return 1 / storage.size_bytes if storage.size_bytes else math.inf


@final
class MemorySavedPerSecond(Heuristic):
    """h_MSPS: the most bytes per second of recomputing, with what must be recomputed before."""

    def __init__(self) -> None:
        super().__init__()
        self._ancestors = _evicted_ancestors()

    def score(self, storage: Storage, now: int, lowest: float = math.inf) -> float:
        self.accesses += 1
        nanoseconds = storage.nanoseconds + self._ancestors.of(storage)
        return nanoseconds / storage.size_bytes if storage.size_bytes else math.inf

    def evicted(self, storage: Storage) -> None:
        self._ancestors.changed(storage)

    returned = evicted

    @property
    def total_accesses(self) -> int:
        return self.accesses + self._ancestors.accesses


@final
class ExactNeighbourhood(Heuristic):
    """h_DTR: time to recompute, over size and staleness.

    The time is that of the storage and of its evicted neighbourhood: the evicted storages that
    would be recomputed before it, and those that need it to be recomputed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ancestors, self._descendants = _evicted_ancestors(), _evicted_descendants()

    def score(self, storage: Storage, now: int, lowest: float = math.inf) -> float:
        self.accesses += 1
        divisor = storage.size_bytes * (now - storage.last_access)
        if divisor == 0 or storage.nanoseconds / divisor > lowest:
            return math.inf
        evicted = self._ancestors.of(storage) + self._descendants.of(storage)
        return (storage.nanoseconds + evicted) / divisor

    def evicted(self, storage: Storage) -> None:
        self._ancestors.changed(storage)
        self._descendants.changed(storage)

    returned = evicted

    @property
    def total_accesses(self) -> int:
        return self.accesses + self._ancestors.accesses + self._descendants.accesses


@final
class EquivalenceClasses(Heuristic):
    """h_DTR^eq: as h_DTR, with the neighbourhood approximated by classes of evicted storages.

    A class is a connected set of evicted storages, regardless of direction, with the sum of their
    times; a union-find finds it in almost constant time. A storage that returns takes its time out
    of its class, but the class is not split: that is the approximation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[Storage, _Class] = {}
        self._beside: defaultdict[Storage, dict[Storage, _Class]] = defaultdict(dict)
        """For each storage the evicted ones next to it, with their classes: scores are read far
        more often than storages are evicted."""

    def score(self, storage: Storage, now: int, lowest: float = math.inf) -> float:
        self.accesses += 1
        divisor = storage.size_bytes * (now - storage.last_access)
        if divisor == 0 or storage.nanoseconds / divisor > lowest:
            return math.inf
        nanoseconds = storage.nanoseconds
        for found in self._classes_beside(storage):
            nanoseconds += found.nanoseconds
        return nanoseconds / divisor

    def evicted(self, storage: Storage) -> None:
        merged = self._classes[storage] = _Class(storage.nanoseconds)
        for found in self._classes_beside(storage):
            found.parent = merged
            merged.nanoseconds += found.nanoseconds
        for neighbour in (*storage.parents, *storage.children):
            self._beside[neighbour][storage] = merged

    def returned(self, storage: Storage) -> None:
        its_class = self._classes.pop(storage, None)
        if its_class is None:  # it is computed for the first time
            return
        its_class.root().nanoseconds -= storage.nanoseconds
        for neighbour in (*storage.parents, *storage.children):
            self._beside[neighbour].pop(storage, None)

    def _classes_beside(self, storage: Storage) -> set[_Class]:
        evicted = self._beside[storage]
        self.accesses += len(evicted)
        return {one.root() for one in evicted.values()}


HEURISTICS: dict[str, type[Heuristic]] = {
    "h_DTR": ExactNeighbourhood,
    "h_DTR^eq": EquivalenceClasses,
    "h_MSPS": MemorySavedPerSecond,
    "h_LRU": LeastRecentlyUsed,
    "h_size": LargestFirst,
}
"""The heuristics, by their names in the paper."""


@final
class _Class:
    """A node of the union-find; roots have the time of their class."""

    __slots__ = ("nanoseconds", "parent")

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds
        self.parent: _Class | None = None

    def root(self) -> _Class:
        top = self
        while top.parent is not None:
            top = top.parent
        node = self
        while node.parent is not None:  # let every node on the way point at the root
            node.parent, node = top, node.parent
        return top


@final
class _EvictedTime:
    """Time of the evicted storages that a storage reaches in one direction over evicted ones only.

    A sum is kept until one of the storages in it returns, or one beside them is evicted.
    """

    def __init__(self, ahead: _Step, back: _Step) -> None:
        self._ahead, self._back = ahead, back
        self._sums: dict[Storage, int] = {}
        self.accesses = 0

    def of(self, storage: Storage) -> int:
        if storage not in self._sums:
            evicted = self._walk(storage, self._ahead)[0]
            self._sums[storage] = sum(one.nanoseconds for one in evicted)
        return self._sums[storage]

    def changed(self, storage: Storage) -> None:
        """Forget the sums that this storage enters or leaves."""
        self._sums.pop(storage, None)
        for resident in self._walk(storage, self._back)[1]:
            self._sums.pop(resident, None)

    def _walk(self, start: Storage, step: _Step) -> tuple[set[Storage], set[Storage]]:
        """The evicted storages that are reached, and the resident ones where the walk ends."""
        evicted, resident, ahead = set[Storage](), set[Storage](), [start]
        while ahead:
            for one in step(ahead.pop()):
                self.accesses += 1
                if one.resident:
                    resident.add(one)
                elif one not in evicted:
                    evicted.add(one)
                    ahead.append(one)
        return evicted, resident


_Step = Callable[[Storage], Iterable[Storage]]


def _evicted_ancestors() -> _EvictedTime:
    return _EvictedTime(lambda one: one.parents, lambda one: one.children)


def _evicted_descendants() -> _EvictedTime:
    return _EvictedTime(lambda one: one.children, lambda one: one.parents)
