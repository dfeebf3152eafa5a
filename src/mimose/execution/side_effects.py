"""Side effects of a forward besides buffers: state, stored losses, collected features.

Objects that a module holds, for example a collector of losses, are treated like modules.

A recompute must not repeat a forward's side effects: a state would advance twice, a list would
grow, and a tensor stored on a module would keep the rebuilt graph alive with all its activations.
So a recompute runs with the attributes from before its forward and without hooks that only observe.
Afterwards the present attributes are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.execution.attributes import (
    MODULE_INTERNALS,
    NOT_COPIED,
    AttributeSlot,
    attribute_changed,
    attribute_holders,
    copy_value,
)
from mimose.execution.generators import GENERATORS, Generator, OtherGenerators
from mimose.execution.hook_watch import Hook, HookWatch, without_hooks
from mimose.execution.temporary_values import ABSENT, Entry, run_with
from mimose.execution.undo import put_back_attributes, put_back_plain_values
from mimose.execution.watched_parameter import WatchedParameter
from mimose.tensors import version_of


class SideEffects(NamedTuple):
    """What a block's first run has changed on its modules, and the hooks that only observe."""

    attributes: tuple[AttributeSlot, ...] = ()
    passive_hooks: tuple[Hook, ...] = ()
    draws: bool = False
    """Whether the block draws from generators other than torch's default ones."""
    generators: tuple[Generator, ...] = ()

    @property
    def only_on_modules(self) -> bool:
        """Whether all changed attributes are those of modules, which have names."""
        return all(isinstance(holder, nn.Module) for holder, _ in self.attributes)

    def __bool__(self) -> bool:
        return bool(self.attributes or self.passive_hooks or self.draws)

    def without_former_objects(self, block: nn.Module) -> SideEffects:
        """Without attributes of objects that the block does not hold any more."""
        if self.only_on_modules:
            return self
        held = set(map(id, attribute_holders(block)))
        attributes = tuple((h, name) for h, name in self.attributes if id(h) in held)
        return self._replace(attributes=attributes)


class AttributeSnapshot:
    """Attributes before a forward, to be restored for its recompute."""

    __slots__ = ("_generators", "_passive_hooks", "_values")

    def __init__(
        self,
        values: Iterable[tuple[Any, str, Any]],
        passive_hooks: tuple[Hook, ...] = (),
        generators: OtherGenerators | None = None,
    ) -> None:
        self._values = [(h, name, copy_value(value, graph=False)) for h, name, value in values]
        self._passive_hooks = passive_hooks
        self._generators = generators

    @classmethod
    def before_forward(cls, side_effects: SideEffects) -> AttributeSnapshot:
        """The present values of the attributes that a forward is known to change."""
        values = ((h, name, vars(h).get(name, ABSENT)) for h, name in side_effects.attributes)
        generators = OtherGenerators(side_effects.generators) if side_effects.draws else None
        return cls(values, side_effects.passive_hooks, generators)

    def do_not_skip(self, hooks: Collection[Hook]) -> None:
        """Let recomputes call these hooks, too."""
        self._passive_hooks = tuple(hook for hook in self._passive_hooks if hook not in hooks)

    @property
    def too_large(self) -> set[tuple[int, str]]:
        """The attributes whose values were too large to copy, by id of their holder and name."""
        return {(id(h), name) for h, name, value in self._values if value is NOT_COPIED}

    def put_back(self) -> bool:
        """Undo a forward that broke off.

        Returns False if it has changed more than plain values, or may have called passive hooks: a
        second run would repeat what these do.
        """
        if self._passive_hooks:
            return False
        if self._generators is not None:
            self._generators.restore()
        return put_back_plain_values(self._values)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with these attributes, then restore the present ones."""
        entries = [
            (vars(h), name, vars(h).get(name, ABSENT) if v is NOT_COPIED else copy_value(v))
            for h, name, v in self._values
        ]
        with without_hooks(self._passive_hooks):
            if self._generators is None:
                return run_with(entries, function, *args)
            return run_with(entries, self._generators.run, function, *args)


def run_without_side_effects(
    block: nn.Module, known: SideEffects, function: Callable[..., Any], *args: Any
) -> Any:
    """Call `function`, which runs the block, then restore all attributes of its modules.

    Of what the block is known to do besides, its generators are restored and its passive hooks are
    not called.
    """
    holders = attribute_holders(block)
    before = [frozenset(vars(holder)) | MODULE_INTERNALS for holder in holders]
    slots = ((h, n) for h in holders for n in vars(h) if n not in MODULE_INTERNALS)
    try:
        everything = known._replace(attributes=tuple(slots))
        return AttributeSnapshot.before_forward(everything).run(function, *args)
    finally:
        for holder, names in zip(holders, before, strict=True):
            for name in vars(holder).keys() - names:
                del vars(holder)[name]


class FirstRunObserver:
    """Finds the side effects of a block's first run. Created before that run."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._before = [
            (h, {n: (v, copy_value(v)) for n, v in vars(h).items() if n not in MODULE_INTERNALS})
            for h in attribute_holders(block)
        ]
        self._hooks = HookWatch()
        self._generators = OtherGenerators(self._own_generators())
        self._parameters = [WatchedParameter(*named) for named in block.named_parameters()]
        tensors = (v for _, before in self._before for v, copy in before.values() if v is copy)
        self._uncopied = [(t, version_of(t)) for t in tensors if isinstance(t, torch.Tensor)]

    @property
    def irreversible_change(self) -> str | None:
        """A change by the run that a recompute would repeat, e.g. of a codebook; None if none."""
        for parameter in self._parameters:
            if parameter.changed:
                return f"its parameter {parameter.name!r} in its forward"
        changed = (f"a tensor {list(t.shape)} on its modules in place" for t in self._overwritten())
        return next(changed, None)

    def _overwritten(self) -> Iterator[torch.Tensor]:
        """The tensors without a copy that the run has changed in place."""
        return (t for t, version in self._uncopied if version_of(t) != version)

    def _own_generators(self) -> tuple[Generator, ...]:
        """The random generators in the attributes of the block's modules, also in containers."""
        values = [value for _, before in self._before for value, _ in before.values()]
        for value in list(values):
            if type(value) in (list, tuple):
                values += value
            elif type(value) is dict:
                values += value.values()
        return tuple({id(g): g for g in values if isinstance(g, GENERATORS)}.values())

    @contextmanager
    def watching_hooks(self) -> Iterator[None]:
        """Find the forward hooks inside the block that only observe while it runs."""
        inside = [part for part, _ in self._before if isinstance(part, nn.Module)]
        with self._hooks.watching([part for part in inside if part is not self._block]):
            yield

    def side_effects(self) -> SideEffects:
        """The side effects of the run, once it is over."""
        overwritten = set(map(id, self._overwritten()))
        changed = [
            (holder, name)
            for holder, before in self._before
            for name in {*before, *vars(holder)} - MODULE_INTERNALS
            if id(now := vars(holder).get(name, ABSENT)) in overwritten
            or attribute_changed(now, *before.get(name, (ABSENT, ABSENT)))
        ]
        # A pre-hook may set the weight that the forward uses: it is passive only on a module
        # without changes.
        with_changes = {id(holder) for holder, _ in changed}
        passive = (
            (module, key)
            for module, key in self._hooks.called - self._hooks.acting
            if key in module._forward_hooks or id(module) not in with_changes
        )
        draws = self._generators.advanced()
        generators = self._own_generators() if draws else ()
        return SideEffects(tuple(changed), tuple(passive), draws, generators)

    def unchanged(self, side_effects: SideEffects) -> list[Entry]:
        """The attributes that the run has left unchanged."""
        changed = {(id(holder), name) for holder, name in side_effects.attributes}
        return [
            (vars(holder), name, value)
            for holder, before in self._before
            for name, (value, _) in before.items()
            if (id(holder), name) not in changed
        ]

    def snapshot(self, side_effects: SideEffects) -> AttributeSnapshot:
        """The changed attributes as they were before the run."""
        copies = {
            (id(holder), name): copy
            for holder, before in self._before
            for name, (_, copy) in before.items()
        }
        values = ((h, n, copies.get((id(h), n), ABSENT)) for h, n in side_effects.attributes)
        generators = self._generators if side_effects.draws else None
        return AttributeSnapshot(values, side_effects.passive_hooks, generators)

    def put_back(self) -> bool:
        """Undo the run, which broke off. Returns False if it has changed something for good."""
        if self.irreversible_change is not None or self._hooks.called - self._hooks.acting:
            return False
        for holder, before in self._before:
            put_back_attributes(holder, before)
        self._generators.restore()
        return True
