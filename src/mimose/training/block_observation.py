"""What is seen of one run of a block while its step is observed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mimose.costs import Observation, Run
from mimose.tensors import storage_of, storages_in


@dataclass(slots=True)
class Seen:
    """What is known so far of one run: bytes above the step's start, or as they were read."""

    key: Run
    input_bytes: int
    start: int
    gap: int = 0
    forward: int = 0
    out_saved: int = 0
    own_outputs: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    """Outputs that it saves itself, and that no run has been given yet."""
    lent: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    """Inputs that the run before saves: where that is kept, they outlive this one's backward."""
    idle: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    idle_bytes: int = 0
    collected: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Inputs that it does not save, and that somebody else held on to while it ran."""
    before: int | None = None
    entry: int = 0
    born: int = 0
    after: int = 0
    saved: int = 0
    spike: int = 0
    back: int = 0
    begun: Any = None
    ended: Any = None
    kept: bool = False
    """Whether others, that are recomputed, tell of it."""
    awaited: bool = False
    """Whether its backward was to come."""
    entered: bool = False
    """Whether it came."""
    late: bool = False
    """Whether it came in another backward, after the step's."""

    @property
    def unused(self) -> bool:
        """Whether the loss did not depend on it."""
        return self.awaited and not self.entered and self.before is None

    def forward_ends(
        self, own_outputs: list[torch.UntypedStorage], idle_inputs: list[torch.Tensor]
    ) -> None:
        """Its forward has made these outputs, which it saves, and does not save these inputs."""
        self.own_outputs = [weakref.ref(storage) for storage in own_outputs]
        self.idle = [weakref.ref(tensor) for tensor in idle_inputs if tensor.grad_fn is not None]

    def pass_on(self, args: Any, kwargs: Any) -> list[weakref.ref[torch.UntypedStorage]]:
        """What the next run is given lives on, whether this one is recomputed or not: these."""
        given = storages_in((args, kwargs))
        passed, others = [], []
        for ref in self.own_outputs:
            storage = ref()
            if storage is not None and storage._cdata in given:
                self.out_saved += storage.nbytes()
                passed.append(ref)
            else:
                others.append(ref)
        self.own_outputs = others
        return passed

    def settle_outputs(self) -> bool:
        """The backward begins: outputs that are alive are so anyway. Those that the model has let
        go of (attention weights that nobody wants) live only if the run is kept, and inputs that it
        has let go of (states that it collects) only if it is recomputed; whether there are any."""
        let_go = any(map(_is_alone, self.collected))
        self.collected = []
        for ref in self.own_outputs:
            storage = ref()
            self.out_saved += 0 if storage is None else storage.nbytes()
            let_go |= storage is None
        self.own_outputs = []
        return let_go

    def settle_idle_inputs(self, *, alone: bool) -> None:
        """Its caller has moved on: which inputs are there for its recompute `alone`, if any may be?

        None that somebody else still refers to (masks, collected states), nor any that the operator
        that made it saves (a ReLU between two blocks).
        """
        for ref in self.idle if alone else ():
            if _is_alone(ref):
                self.idle_bytes += _bytes_behind(ref)
            else:
                self.collected.append(ref)
        self.idle = []

    def observation(self, seconds: float) -> Observation:
        """What counts of it."""
        return Observation(
            start_bytes=self.start,
            forward_bytes=self.forward,
            entry_bytes=self.entry,
            born_bytes=self.born,
            saved_bytes=max(0, self.saved),
            spike_bytes=max(0, self.spike),
            back_bytes=max(0, self.back),
            out_saved_bytes=min(self.out_saved, max(0, self.saved)),
            in_idle_bytes=self.idle_bytes,
            seconds=seconds,
            fixed=self.before is None,
            input_bytes=self.input_bytes,
            gap_bytes=self.gap,
        )


def _is_alone(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether a recompute alone holds on to this tensor, and nobody shares its memory."""
    return _references(ref) <= _ONE_HOLDER and _unshared(ref)


def _bytes_behind(ref: weakref.ref[torch.Tensor]) -> int:
    tensor = ref()
    storage = None if tensor is None else storage_of(tensor)
    return 0 if storage is None else storage.nbytes()


def _references(ref: weakref.ref[torch.Tensor]) -> int:
    tensor = ref()
    return sys.getrefcount(tensor)


def _unshared(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether no other tensor, autograd's own included, shares its memory; but a view's base."""
    tensor = ref()
    return tensor is None or _users(tensor) <= _ONE_USER + tensor._is_view()


def _users(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None or _use_count is None else _use_count(storage._cdata)


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_held_once = torch.empty(0)
_ONE_HOLDER = _references(weakref.ref(_held_once))
"""What `_references` counts for a tensor that a single other holder refers to."""
_ONE_USER = _users(_held_once)
