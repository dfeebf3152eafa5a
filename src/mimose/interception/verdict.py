"""What is known of a block: whether it can be recomputed, and what its recompute must restore."""

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
    buffers_in,
    norm_buffers,
    parameter_slots,
)
from mimose.interception.blocks import Block
from mimose.interception.interceptor import Interceptor
from mimose.interception.tried import Tried


class JudgedInterceptor(Interceptor):
    """An interceptor with a verdict: whether its block can be recomputed, and what to restore."""

    __slots__ = (
        "attempts",
        "build",
        "called",
        "calls_blocks",
        "changing",
        "collective_ranks",
        "comes_last",
        "early_stop",
        "examined",
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
        self.comes_last = False
        """Whether this is the last block of the model."""
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of the block."""
        self.trusted: bool | None = None
        """Whether the block can be recomputed; None before its first run."""
        self.attempts = 0
        """The number of trials that failed for lack of memory."""
        self.early_stop = True
        self.changing: list[BufferSlot] = []
        """The buffers that the forward changes."""
        self.side_effects = SideEffects()
        self.examined = False
        """Whether `changing` and `side_effects` are known."""
        self.build: ModuleStructure | None = None
        """The block's structure when it was tried."""
        self.later: ChangeDetector | None = None
        """Watches what the block's forwards have not changed so far."""
        self.large: set[tuple[int, str]] = set()
        """Attributes with values too large to copy in the trial: id of the holder, and name."""
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.calls_blocks = False
        """Whether its forward calls itself or other blocks, which then are a part of its run."""
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The other blocks that it calls."""
        self.collective_ranks: frozenset[int] = frozenset()
        """The ranks that take part in collectives of the forward, recorded in the trial."""

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What the trial has shown, in plain values.

        None before a trial, if the module is gone, or if other objects than modules were changed.
        """
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
            "calls_blocks": self.calls_blocks,
        }

    def adopt(self, verdict: Mapping[str, Any]) -> None:
        """Adopt the verdict of an earlier run of the same model, so that no trial is needed.

        Does nothing if the block draws from its own generators, or has hooks inside: a trial must
        examine these.
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
        self.calls_blocks = bool(verdict.get("calls_blocks", False))
        self.trusted = bool(verdict["trusted"])

    def _settle(self, changing: list[BufferSlot], side_effects: SideEffects) -> None:
        self.changing, self.side_effects, self.examined = changing, side_effects, True
        self.parameters = parameter_slots(self.module)
        self.build = ModuleStructure(self.module)
        self._watch_unchanged()

    def _watch_unchanged(self) -> ChangeDetector:
        known = {(id(module), name) for module, name in self.changing}
        places = all_buffer_slots(self.module)
        quiet = [(module, name) for module, name in places if (id(module), name) not in known]
        self.side_effects = self.side_effects.without_former_objects(self.module)
        known_attributes, with_large = self.side_effects.attributes, self.tried.with_large
        self.later = ChangeDetector(self.module, known_attributes, quiet, with_large)
        return self.later

    def move_to(self, module: nn.Module) -> None:
        """Intercept `module`, which has replaced the block, and forget the former verdict."""
        self.remove()
        self._module = weakref.ref(module)
        self._forget()
        self.install()

    def let_go(self) -> None:
        """Release every reference to modules, parameters and steps."""
        self._forget()
        self.tried = Tried()

    def follow(self, trusted: bool | None) -> None:
        """Adopt another rank's verdict: False if the block cannot be recomputed, None to try it."""
        self.trusted = trusted

    def calls(self, other: nn.Module) -> None:
        """The block calls a block in its forward: itself, or one that is not its child."""
        self.calls_blocks = True
        if other is not self._module():
            self.called.add(other)

    @property
    def calls_buffers(self) -> bool:
        """Whether other blocks that it calls have buffers."""
        return any(map(buffers_in, self.called))

    def distrust(self, problem: str) -> None:
        """Keep the block from now on, since it cannot be recomputed, and warn."""
        self.trusted = False
        what = f"cannot be recomputed: {problem}. It is kept from now on"
        self.tried.tell(self, what, f"; exclude={self.name!r} avoids this warning")

    def examine(self, buffers: BufferSnapshot, side_effects: SideEffects) -> None:
        """Remember what a forward has changed, also if the block is kept from now on."""
        self.changing = list({*buffers.changed(), *norm_buffers(self.module)})
        self.side_effects = side_effects
        self.examined = True

    def trust(self) -> None:
        """Recompute the block from now on, restoring what its forward changed."""
        self._settle(self.changing, self.side_effects)
        self.trusted = True
        self.early_stop = self.compiled is not None or self.tried.stops.get(type(self.module), True)

    def _attributes_before(self) -> AttributeSnapshot | None:
        return AttributeSnapshot.before_forward(self.side_effects) if self.side_effects else None

    def _before(self) -> StateBeforeForward:
        """The present state of everything that no forward has changed so far."""
        if self.later is None or not self.later.up_to_date:
            return self._watch_unchanged().before_forward()
        try:
            return self.later.before_forward()
        except KeyError:  # one attribute was removed and another one added
            return self._watch_unchanged().before_forward()
