"""What is known of a block: whether it can be recomputed, and what its recompute must put back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mimose.execution import (
    AttributeSnapshot,
    BufferSlot,
    BufferSnapshot,
    ChangeDetector,
    ModuleStructure,
    SideEffects,
    StateBeforeForward,
    all_buffer_slots,
    norm_buffers,
    parameter_slots,
)
from mimose.interception.blocks import Block
from mimose.interception.interceptor import Interceptor
from mimose.interception.tried import Tried


class JudgedInterceptor(Interceptor):
    """An interceptor that knows whether its block can be recomputed, and what that takes."""

    __slots__ = (
        "attempts",
        "build",
        "changing",
        "collective_ranks",
        "comes_last",
        "early_stop",
        "large",
        "later",
        "name",
        "parameters",
        "side_effects",
        "tried",
        "trusted",
    )

    def __init__(self, block: Block, tried: Tried) -> None:
        super().__init__(block.module)
        self.name = block.name
        self.tried = tried
        tried.classes[type(block.module)] += 1
        self.trusted: bool | None = None
        """Whether it can be recomputed; not known before its first run."""
        self.attempts = 0
        """How often there was no memory to try it."""
        self.early_stop = True
        self.changing: list[BufferSlot] = []
        """The buffers that its forward changes."""
        self.side_effects = SideEffects()
        self.build: ModuleStructure | None = None
        """How it was made when it was tried."""
        self.later: ChangeDetector | None = None
        """Looks at what it has left alone so far."""
        self.large: set[tuple[int, str]] = set()
        """Attributes with which it was tried though their values are too large to be kept."""
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.comes_last = False
        """Whether it is the last block of its model."""
        self.collective_ranks: frozenset[int] = frozenset()
        """The ranks that take part in collectives of its forward, found out on its first run."""

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What its first run has shown, in plain values; None if it has not run, or is gone."""
        module = self._module()
        if self.trusted is None or module is None or not self.side_effects.only_on_modules:
            return None
        names = {id(m): name for name, m in module.named_modules()}

        def named(places: Iterable[BufferSlot]) -> list[list[str]]:
            return [[names[id(m)], name] for m, name in places if id(m) in names]

        return {
            "trusted": self.trusted,
            "early_stop": self.early_stop,
            "changing": named(self.changing),
            "traces": named(self.side_effects.attributes),
            "draws": self.side_effects.draws,
        }

    def adopt(self, verdict: Mapping[str, Any]) -> None:
        """Take over the verdict of an earlier run of the same model: no need to try again.

        Unless it draws from generators of its own, or has hooks inside that must run first.
        """
        parts = dict(self.module.named_modules())
        inside = [part for name, part in parts.items() if name]
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in inside)
        if hooked or verdict.get("draws", False):
            return
        changing = [(parts[str(at)], str(name)) for at, name in verdict["changing"]]
        left = [(parts[str(at)], str(name)) for at, name in verdict.get("traces", ())]
        self._settle(changing, SideEffects(tuple(left)))
        self.early_stop = bool(verdict["early_stop"])
        self.trusted = bool(verdict["trusted"])

    def _settle(self, changing: list[BufferSlot], side_effects: SideEffects) -> None:
        self.changing, self.side_effects = changing, side_effects
        self.parameters = parameter_slots(self.module)
        self.build = ModuleStructure(self.module)
        self._look_for_more()

    def _look_for_more(self) -> ChangeDetector:
        known = {(id(module), name) for module, name in self.changing}
        places = all_buffer_slots(self.module)
        quiet = [(module, name) for module, name in places if (id(module), name) not in known]
        self.later = ChangeDetector(self.module, self.side_effects.attributes, quiet)
        return self.later

    def move_to(self, module: nn.Module) -> None:
        """Another module has taken the block's place: nothing is known of it."""
        self.remove()
        self._module = weakref.ref(module)
        self.trusted, self.attempts, self.early_stop = None, 0, True
        self.changing, self.parameters, self.side_effects = [], [], SideEffects()
        self.build = self.later = None
        self.large = set()
        self.install()

    def let_go(self) -> None:
        """Hold on to no module, no parameter and no step any more."""
        self.changing, self.parameters, self.side_effects = [], [], SideEffects()
        self.build = self.later = None
        self.tried = Tried()

    def follow(self, trusted: bool | None) -> None:
        """Take over what another rank has found: that it cannot be recomputed, or must be tried."""
        self.trusted = trusted

    def distrust(self, problem: str) -> None:
        """It cannot be recomputed: it is kept from now on."""
        self.trusted = False
        what = f"cannot be recomputed: {problem}. It is kept from now on"
        self.tried.tell(self, what, f"; exclude={self.name!r} avoids this warning")

    def trust(self, buffers: BufferSnapshot, side_effects: SideEffects) -> None:
        """It can be recomputed, if what its forward changed is put back."""
        self._settle(list({*buffers.changed(), *norm_buffers(self.module)}), side_effects)
        self.trusted = True
        self.early_stop = self.compiled is not None or self.tried.stops.get(type(self.module), True)

    def _attributes_before(self) -> AttributeSnapshot | None:
        return AttributeSnapshot.before_forward(self.side_effects) if self.side_effects else None

    def _before(self) -> StateBeforeForward:
        """What a forward that begins now finds of what no forward has changed yet."""
        if self.later is None or not self.later.up_to_date:
            return self._look_for_more().before_forward()
        try:
            return self.later.before_forward()
        except KeyError:  # an attribute went as another one came
            return self._look_for_more().before_forward()
