"""Detect that a block has changed since its trial.

Its modules may be replaced, hooks may be added, or it may begin to count its calls or to update a
buffer. This is checked around every forward that will be recomputed, so it must take microseconds:
values are compared by identity. The old values of what a forward has changed are kept for its
recompute.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableSet
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.attributes import (
    MODULE_INTERNALS,
    MOST_COPIED_BYTES,
    AttributeSlot,
    attribute_changed,
    attribute_holders,
    copy_value,
    equals_copy,
)
from mimose.execution.buffers import BufferSlot
from mimose.execution.temporary_values import ABSENT, Entry, run_with_former
from mimose.execution.watched_tensor import WatchedTensor
from mimose.tensors import bytes_of

_MOST_ATTRIBUTES = 32
"""Objects with more attributes, e.g. a model's configuration, are checked in the first run only."""
_MUTABLE = (list, dict, set, deque, tuple, np.ndarray)
"""A tuple may hold one of the others."""


@dataclass(frozen=True, slots=True)
class NewChanges:
    """What a forward has changed that no earlier forward of the block had changed."""

    attributes: list[tuple[Any, str, Any]]
    """Holder, name, and the value before the forward."""
    buffers: list[tuple[nn.Module, str, Any]]
    lost: str
    """The name of a large tensor changed in place, whose old value is unknown; or empty."""
    parameter: str = ""
    """The name of a parameter changed in place: a recompute would change it again."""

    @property
    def slots(self) -> tuple[list[BufferSlot], tuple[AttributeSlot, ...]]:
        return (
            [(module, name) for module, name, _ in self.buffers],
            tuple((holder, name) for holder, name, _ in self.attributes),
        )


class ChangeDetector:
    """Watches the attributes and buffers that a block's forwards have left unchanged so far.

    Call `before_forward`, run the forward, then call `new_changes` of the result. If an attribute
    is a large tensor, the detector adds itself to `with_large`. Then call `note_earlier`, too,
    whenever the model is called.
    """

    __slots__ = (
        "__weakref__",
        "_earlier",
        "_held",
        "_mutable",
        "_types",
        "_with_large",
        "dicts",
        "getters",
        "holders",
        "names",
        "parameters",
        "sizes",
        "tensors",
        "without_tensors",
    )

    def __init__(
        self,
        block: nn.Module,
        known: Iterable[AttributeSlot],
        buffers: Iterable[BufferSlot],
        with_large: MutableSet[ChangeDetector],
    ) -> None:
        self.holders: list[Any] = []
        self.names: list[list[str]] = []
        self.getters: list[Callable[[Any], tuple[Any, ...]]] = []
        self.tensors = [WatchedTensor(module, module._buffers, name) for module, name in buffers]
        skipped = {(id(holder), name) for holder, name in known}
        for holder in attribute_holders(block):
            if _sets_no_attributes(holder):
                continue
            names = [name for name in vars(holder) if name not in MODULE_INTERNALS]
            names = [name for name in names if (id(holder), name) not in skipped]
            if isinstance(holder, nn.Module) or len(names) <= _MOST_ATTRIBUTES:
                self._add(holder, names)
        self._types: list[type] | None = None
        self._mutable: list[AttributeSlot] = []
        """The attributes that a forward may change in place, if all attributes have `_types`."""
        self.without_tensors: list[type] | None = None
        """Types of all attributes among which there was no tensor: values would be kept alive."""
        self._with_large = with_large
        self._earlier: list[weakref.ref[torch.Tensor]] = []
        # Wrappers such as FSDP1 replace parameters, and have no holders.
        self.parameters = _parameters_in(block) if self.holders else []
        self.dicts = [vars(holder) for holder in self.holders]
        self.sizes = list(map(len, self.dicts))
        objects = {id(holder) for holder in self.holders if not isinstance(holder, nn.Module)}
        self._held = [
            (table, name, value)
            for table in self.dicts
            for name, value in table.items()
            if id(value) in objects
        ]
        """Where the watched objects are: others may take their places."""

    def _add(self, holder: Any, names: list[str]) -> None:
        self.holders.append(holder)
        self.names.append(names)
        self.getters.append(_getter(names))
        for name in names:
            value = vars(holder)[name]
            if isinstance(value, torch.Tensor):
                self.tensors.append(WatchedTensor(holder, vars(holder), name))

    def note_earlier(self) -> None:
        """The model was called: remember the tensors that are there already."""
        values = (t.get(n) for t, names in zip(self.dicts, self.names, strict=True) for n in names)
        self._earlier = [weakref.ref(v) for v in values if isinstance(v, torch.Tensor)]

    def holds(self, tensor: torch.Tensor, oldest_node: int) -> bool:
        """Whether a recompute may hold this tensor until the backward."""
        node = tensor.grad_fn
        if node is not None:
            return node._sequence_nr() >= oldest_node
        if isinstance(tensor, nn.Parameter) or bytes_of([tensor]) <= MOST_COPIED_BYTES:
            return True
        self._with_large.add(self)
        return not any(ref() is tensor for ref in self._earlier)

    def parameter_versions(self) -> list[tuple[type, int]]:
        """The type of each parameter, and how often it was changed in place; -1 if removed."""
        found = [table.get(name) for _, table, name in self.parameters]
        return [(type(p), -1 if p is None else p._version) for p in found]

    @property
    def up_to_date(self) -> bool:
        """Whether no attributes were added or removed since, and no object was replaced."""
        if self.sizes != list(map(len, self.dicts)):
            return False
        return not self._held or all(table.get(name) is value for table, name, value in self._held)

    def mutable(self, types: list[type], values: list[tuple[Any, ...]]) -> list[AttributeSlot]:
        """The attributes that a forward may change in place, by the types of all values."""
        if types != self._types:
            self._types = types
            self._mutable = [
                (holder, name)
                for holder, names, held in zip(self.holders, self.names, values, strict=True)
                for name, value in zip(names, held, strict=False)
                if isinstance(value, _MUTABLE)
            ]
        return self._mutable

    def before_forward(self) -> StateBeforeForward:
        """Record the present state. Raises KeyError if an attribute was removed."""
        return StateBeforeForward(self)


def _parameters_in(block: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """The name of each parameter in a block, and its place: parameters may be replaced."""
    return [
        (f"{prefix}.{name}".lstrip("."), part._parameters, name)
        for prefix, part in block.named_modules()
        if isinstance(part._parameters, dict)
        for name, parameter in part._parameters.items()
        if parameter is not None and not parameter.is_inference()
    ]


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gets the values of these names from a dict, as a tuple."""
    if not names:
        return _no_values
    return itemgetter(*names, *names[:1])  # of one name alone it would not be a tuple


def _no_values(_: Any) -> tuple[()]:
    return ()


def _sets_no_attributes(holder: Any) -> bool:
    """Whether this is a layer of torch without hooks: its forward sets no attributes."""
    hooked = isinstance(holder, nn.Module) and (holder._forward_hooks or holder._forward_pre_hooks)
    return type(holder).__module__.startswith("torch.nn.modules.") and not hooked


class StateBeforeForward:
    """The watched attributes and buffers before a forward."""

    __slots__ = ("_copies", "_detector", "_mutable", "_tensors", "_types", "_values", "_versions")

    def __init__(self, detector: ChangeDetector) -> None:
        self._detector = detector
        self._values = self._read()
        self._types = list(map(type, chain.from_iterable(self._values)))
        self._mutable = detector.mutable(self._types, self._values)
        mutable = [vars(holder)[name] for holder, name in self._mutable]
        different = {id(value): value for value in mutable}.items()  # modules share a config
        copies = {key: copy_value(value, tensors=False) for key, value in different}
        self._copies = [copies[id(value)] for value in mutable]
        self._tensors = [tensor.record() for tensor in detector.tensors]
        self._versions = detector.parameter_versions()

    def _read(self) -> list[Any]:
        detector = self._detector
        return [get(held) for get, held in zip(detector.getters, detector.dicts, strict=True)]

    def for_recompute(self, oldest_node: int) -> Callable[..., Any]:
        """Calls a function with the attributes that the forward has found, as a recompute must.

        The model may have set them for this forward only: a scale, a mask, a flag. Left out are
        tensors of earlier forwards, which holding would keep alive: those with a graph that is
        older than `oldest_node`, and large ones that were there before the model was called.
        """
        detector = self._detector
        if self._types != detector.without_tensors:
            entries = self._entries()
            if any(isinstance(value, torch.Tensor) for _, _, value in entries):
                held = [
                    (table, name, value)
                    for table, name, value in entries
                    if not isinstance(value, torch.Tensor) or detector.holds(value, oldest_node)
                ]
                return functools.partial(run_with_former, held)
            detector.without_tensors = self._types
        self._copies, self._tensors = [], []
        return self._run

    def _entries(self) -> list[Entry]:
        detector = self._detector
        return [
            (table, name, value)
            for table, names, values in zip(
                detector.dicts, detector.names, self._values, strict=True
            )
            for name, value in zip(names, values, strict=False)
        ]

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return run_with_former(self._entries(), function, *args)

    def new_changes(self) -> NewChanges | None:
        """What the forward has changed; None if nothing."""
        detector = self._detector
        tensors = [
            (watched, before)
            for watched, before in zip(detector.tensors, self._tensors, strict=True)
            if watched.changed_since(before)
        ]
        attributes = [] if self._same_objects() else self._reassigned()
        attributes += [
            (holder, name, copy)
            for (holder, name), copy in zip(self._mutable, self._copies, strict=True)
            if not equals_copy(vars(holder).get(name), copy)
            and not any(h is holder and n == name for h, n, _ in attributes)
        ]
        parameter = self._changed_parameter()
        if not tensors and not attributes and not parameter:
            return None
        return replace(_new_changes(tensors, attributes), parameter=parameter)

    def _changed_parameter(self) -> str:
        """The name of a parameter that was changed in place or replaced by another one; or empty.

        A nested FSDP2 unit puts parameters of another type in the places of its sharded ones.
        """
        detector = self._detector
        now = detector.parameter_versions()
        if now == self._versions:
            return ""
        return next(
            (
                name
                for (name, *_), (kind, version), (kind_now, version_now) in zip(
                    detector.parameters, self._versions, now, strict=True
                )
                if kind is kind_now and version != version_now
            ),
            "",
        )

    def _same_objects(self) -> bool:
        """Whether all attributes have the same values as before: a quick check."""
        try:
            return self._detector.up_to_date and _equal(self._read(), self._values)
        except KeyError:  # an attribute was removed
            return False

    def _reassigned(self) -> list[tuple[Any, str, Any]]:
        detector, changed = self._detector, []
        for holder, names, values in zip(
            detector.holders, detector.names, self._values, strict=True
        ):
            before = dict(zip(names, values, strict=False))
            added = (n for n in vars(holder) if n not in before and n not in MODULE_INTERNALS)
            for name in (*names, *added):
                was = before.get(name, ABSENT)
                if isinstance(was, torch.Tensor):
                    continue
                if attribute_changed(vars(holder).get(name, ABSENT), was, was):
                    changed.append((holder, name, was))
        return changed


def _equal(a: list[Any], b: list[Any]) -> bool:
    """Whether lists of values are equal: a quick check, which may miss that they are."""
    try:
        return bool(a == b)
    except Exception:  # an array or a tensor: ambiguous truth value
        return False


def _new_changes(
    tensors: list[tuple[WatchedTensor, torch.Tensor | None]],
    attributes: list[tuple[Any, str, Any]],
) -> NewChanges:
    buffers, lost = [], ""
    for watched, before in tensors:
        value = watched.value_before(before)
        if value is ABSENT and before is not None:
            value, lost = before.detach().clone(), watched.name
        if watched.is_buffer:
            buffers.append((watched.holder, watched.name, value))
        else:
            attributes.append((watched.holder, watched.name, value))
    return NewChanges(attributes, buffers, lost)
