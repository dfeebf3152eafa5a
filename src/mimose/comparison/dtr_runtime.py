"""Memory and time of a run under DTR: what is resident, what is locked, what is evicted next."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import final

from mimose.comparison.dtr_graph import Node, Storage, Tensor, attach
from mimose.comparison.dtr_heuristics import Heuristic
from mimose.comparison.trace import Output


class Failure(str, Enum):
    """Why a trace did not run to its end."""

    out_of_memory = "out of memory"
    """Something had to fit, and all that was left is in use by the running call."""
    thrashing = "thrashing"
    """Recomputing took more time than the limit allows."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the simulated runtime does."""

    call: int | None
    """Index of the call that it runs; None for an eviction."""
    evicted: tuple[tuple[int, int], ...] = ()
    """Tensors that an eviction frees, each as the index of its call and of the output."""


class Failed(Exception):
    """The simulated run cannot go on."""

    def __init__(self, reason: Failure) -> None:
        super().__init__(reason.value)
        self.reason = reason


@final
class Runtime:
    """Memory and time of a simulated run."""

    def __init__(
        self,
        budget_bytes: float,
        heuristic: Heuristic,
        limit_nanoseconds: float,
        watch: Callable[[Action], None] | None,
    ) -> None:
        self.heuristic = heuristic
        self.now = 0
        self.peak_bytes = 0
        self.evictions = 0
        self.recomputed_calls = 0
        self._recompute_nanoseconds = 0
        self._budget_bytes = budget_bytes
        self._limit_nanoseconds = limit_nanoseconds
        self._watch = watch
        self._in_use_bytes = 0
        self._evictable: dict[Storage, None] = {}
        """Resident storages without locks; the one that lost its last lock first comes first."""

    def constant(self, size_bytes: int) -> Tensor:
        """Add a tensor that stays."""
        self._make_room(size_bytes)
        storage = Storage(size_bytes)
        storage.resident, storage.locks, storage.references = True, 1, 1
        self._take(size_bytes)
        return Tensor(storage, None, size_bytes)

    def first_run(
        self, node: Node, outputs: tuple[Output, ...], tensors: dict[int, Tensor]
    ) -> list[Tensor]:
        """Run a call that the program makes."""
        self._prepare_inputs(node)
        for output in outputs:
            shared = None if output.alias_of is None else tensors[output.alias_of].storage
            attach(node, shared or Storage(output.size_bytes), output.size_bytes)
        self._compute(node)
        for tensor in node.outputs:
            tensor.storage.last_access = self.now
        return node.outputs

    def release(self, tensor: Tensor) -> None:
        """Note that the program has dropped a tensor; evict its storage with the last one."""
        storage = tensor.storage
        storage.references -= 1
        if storage.references == 0 and storage.resident and storage.locks == 0:
            self._evict(storage)

    def keep(self, tensor: Tensor) -> None:
        """Make a tensor resident until the end."""
        self._materialize(tensor)
        self._lock(tensor.storage)

    def _materialize(self, tensor: Tensor) -> None:
        if tensor.defined or tensor.maker is None:
            return
        self._prepare_inputs(tensor.maker)
        self._recompute(tensor.maker)

    def _prepare_inputs(self, node: Node) -> None:
        """Make the inputs of a call resident and lock them, recomputing what was evicted.

        The calls that wait for an input are on a stack of our own: chains of evicted tensors are
        longer than Python's stack is deep.
        """
        waiting = [(node, self._lock_defined(node))]
        while True:
            current, missing = waiting[-1]
            while missing and missing[-1].defined:
                self._lock(missing.pop().storage)
            if missing:
                maker = missing[-1].maker
                assert maker is not None  # constants are always defined
                waiting.append((maker, self._lock_defined(maker)))
                continue
            waiting.pop()
            if not waiting:
                return
            self._recompute(current)

    def _lock_defined(self, node: Node) -> list[Tensor]:
        """Lock the inputs that are defined; the others, the first of them last."""
        missing = []
        for tensor in node.inputs:
            tensor.storage.last_access = self.now
            if tensor.defined:
                self._lock(tensor.storage)
            else:
                missing.append(tensor)
        return missing[::-1]

    def _recompute(self, node: Node) -> None:
        self._compute(node)
        self.recomputed_calls += 1
        self._recompute_nanoseconds += node.nanoseconds
        if self._recompute_nanoseconds > self._limit_nanoseconds:
            raise Failed(Failure.thrashing)

    def _compute(self, node: Node) -> None:
        """Run a call whose inputs are locked, and unlock them."""
        self._make_room(node.output_bytes)
        self.now += node.nanoseconds
        self._take(node.output_bytes)
        if self._watch is not None:
            self._watch(Action(node.index))
        for tensor in node.outputs:
            self._define(tensor)
        for tensor in node.inputs:
            self._unlock(tensor.storage)

    def _define(self, tensor: Tensor) -> None:
        if tensor.defined:  # a call makes all of its outputs again; the second copy is dropped
            self._in_use_bytes -= tensor.size_bytes
            return
        tensor.defined = True
        storage = tensor.storage
        if not storage.resident:
            storage.resident = True
            self._evictable[storage] = None
            self.heuristic.returned(storage)

    def _make_room(self, size_bytes: int) -> None:
        while self._in_use_bytes + size_bytes > self._budget_bytes:
            if not self._evictable:
                raise Failed(Failure.out_of_memory)
            self.evictions += 1
            self._evict(self._cheapest())

    def _cheapest(self) -> Storage:
        """The evictable storage with the lowest score; of equals, the one unlocked last."""
        score, now = self.heuristic.score, self.now
        lowest, cheapest = math.inf, None
        for storage in self._evictable:
            its_score = score(storage, now, lowest)
            if its_score <= lowest:
                lowest, cheapest = its_score, storage
        assert cheapest is not None
        return cheapest

    def _evict(self, storage: Storage) -> None:
        storage.resident = False
        self._in_use_bytes -= storage.size_bytes
        del self._evictable[storage]
        for tensor in storage.tensors:
            tensor.defined = False
        if self._watch is not None:
            self._watch(Action(None, tuple(map(_place, storage.tensors))))
        self.heuristic.evicted(storage)

    def _take(self, size_bytes: int) -> None:
        self._in_use_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._in_use_bytes)

    def _lock(self, storage: Storage) -> None:
        if storage.locks == 0:
            del self._evictable[storage]
        storage.locks += 1

    def _unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if storage.locks == 0:
            self._evictable[storage] = None


def _place(tensor: Tensor) -> tuple[int, int]:
    assert tensor.maker is not None
    return tensor.maker.index, tensor.maker.outputs.index(tensor)
