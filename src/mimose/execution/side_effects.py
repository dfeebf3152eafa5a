"""What a forward leaves on its modules besides buffers: state, stored losses, collected features.

Objects that a module holds, a collector of losses say, are looked at as modules are.

In the forward all of it is wanted. A recompute would leave it a second time: a state would advance
twice, a list would grow, and a tensor stored on a module would hold the rebuilt graph with all its
activations. So a recompute finds attributes as its forward found them, runs no hook that only
looks on, and afterwards all is as before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mimose.execution.generators import GENERATORS, Dice, Generator
from mimose.tensors import local

Place = tuple[Any, str]
"""A module, or an object that one holds, and the name of one of its attributes."""
Hook = tuple[nn.Module, int]
"""A module and the number of one of its forward hooks."""

ABSENT = object()
_AS_IT_IS = object()
"""Stands for a value that is not kept: the recompute finds what is there then."""
_MOST_BYTES = 1 << 20
"""Larger values are neither kept nor compared."""
_MOST_ITEMS = 1000
"""Of longer containers the items are not copied."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
OWN = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""What every module has: no forward changes that."""
_MOST_HOLDERS = 200
"""Of a block's modules and what they hold, so many are looked at."""
_MOVE_PARAMETERS = frozenset({"torch", "deepspeed", "accelerate", "fairscale", "mimose"})
"""Packages whose hooks do more than look on: a recompute needs them."""
_NOT_LOOKED_AT = _MOVE_PARAMETERS | {"builtins", "logging", "threading", "weakref"}
"""Packages whose objects change in a forward for reasons of their own."""
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.", "fairscale.")


class Exchanged:
    """Parameters that a forward found exchanged for other tensors: `functional_call` does that."""

    __slots__ = ("_values",)

    def __init__(self, values: list[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
        self._values = values

    @classmethod
    def among(cls, places: list[tuple[dict[str, Any], str]]) -> Exchanged | None:
        """Those among these places; None if there are none."""
        values = [
            (parameters, name, value)
            for parameters, name in places
            if type(value := parameters.get(name)) is not nn.Parameter
            and value is not None
            and not isinstance(value, nn.Parameter)
            and not _is_sharded(value)
        ]
        return cls(values) if values else None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with those tensors in place again."""
        present = [(parameters, name, parameters[name]) for parameters, name, _ in self._values]
        try:
            for parameters, name, value in self._values:
                parameters[name] = value
            return function(*args)
        finally:
            for parameters, name, former in present:
                parameters[name] = former


def parameter_places(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the parameters of a module and of those inside it are kept; not those of scripts."""
    parts = (part for part in module.modules() if isinstance(part._parameters, dict))
    return [(part._parameters, name) for part in parts for name in part._parameters]


class SideEffects(NamedTuple):
    """What a block's first run has changed on its modules, and which hooks only looked on."""

    attributes: tuple[Place, ...] = ()
    onlookers: tuple[Hook, ...] = ()
    draws: bool = False
    """Whether it throws other dice than torch's."""
    generators: tuple[Generator, ...] = ()

    @property
    def on_modules_alone(self) -> bool:
        """Whether no object that a module holds is among them: these have no name."""
        return all(isinstance(holder, nn.Module) for holder, _ in self.attributes)

    def __bool__(self) -> bool:
        return bool(self.attributes or self.onlookers or self.draws)


class Imprint:
    """Attributes at one moment, before a forward; `run` its recompute under them."""

    __slots__ = ("_dice", "_onlookers", "_values")

    def __init__(self, side_effects: SideEffects, dice: Dice | None = None) -> None:
        self._dice = dice or (Dice(side_effects.generators) if side_effects.draws else None)
        self._onlookers = side_effects.onlookers
        self._values = [
            (module, name, _kept(vars(module).get(name, ABSENT)))
            for module, name in side_effects.attributes
        ]

    @property
    def large(self) -> set[tuple[int, str]]:
        """The places whose values are too large to be kept."""
        return {(id(m), name) for m, name, value in self._values if value is _AS_IT_IS}

    @classmethod
    def of(cls, values: Iterable[tuple[Any, str, Any]]) -> Imprint:
        """These values of holders' attributes."""
        made = cls(SideEffects())
        made._values = [(holder, name, _kept(value)) for holder, name, value in values]
        return made

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with the attributes as they were, and leave them as they are."""
        present = [
            (module, name, vars(module).get(name, ABSENT)) for module, name, _ in self._values
        ]
        try:
            for module, name, value in self._values:
                if value is not _AS_IT_IS:
                    _put(module, name, copied(value))
            with _without(self._onlookers):
                return function(*args) if self._dice is None else self._dice.run(function, *args)
        finally:
            for module, name, value in present:
                _put(module, name, value)


def without_a_trace(block: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, which runs the block: afterwards all attributes are as before."""
    parts = holders(block)
    before = [frozenset(vars(part)) | OWN for part in parts]
    places = ((part, n) for part in parts for n in vars(part) if n not in OWN)
    try:
        return Imprint(SideEffects(tuple(places))).run(function, *args)
    finally:
        for part, names in zip(parts, before, strict=True):
            for name in vars(part).keys() - names:
                del vars(part)[name]


class FirstLook:
    """A block before its first run: afterwards, what that has left behind."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._before = [
            (holder, {n: (v, copied(v)) for n, v in vars(holder).items() if n not in OWN})
            for holder in holders(block)
        ]
        self._answers: dict[Hook, bool] = {}
        self._dice = Dice(self._generators())

        frozen = (p for p in block.parameters() if not p.requires_grad)
        small = (p for p in frozen if local(p).nbytes <= _MOST_BYTES)
        self._frozen = [(p, local(p.detach()).clone()) for p in small]
        tensors = (v for _, before in self._before for v, copy in before.values() if v is copy)
        self._large = [(t, _version(t)) for t in tensors if isinstance(t, torch.Tensor)]

    @property
    def changed_for_good(self) -> str | None:
        """What the run has changed that a recompute would change again: a codebook, say."""
        if any(not torch.equal(local(p.detach()), value) for p, value in self._frozen):
            return "a frozen parameter"
        changed = (t for t, version in self._large if _version(t) != version)
        return next((f"a tensor {list(t.shape)} on its modules in place" for t in changed), None)

    def _generators(self) -> tuple[Generator, ...]:
        """Those that the block's modules keep, by themselves or several together."""
        own = [value for _, before in self._before for value, _ in before.values()]
        for value in list(own):
            if type(value) in (list, tuple):
                own += value
            elif type(value) is dict:
                own += value.values()
        return tuple({id(g): g for g in own if isinstance(g, GENERATORS)}.values())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs: which forward hooks inside it return nothing?"""
        inside = [part for part, _ in self._before if isinstance(part, nn.Module)]
        with _hooks([part for part in inside if part is not self._block], self._heard):
            yield

    def _heard(self, module: nn.Module, key: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        package = (getattr(hook, "__module__", None) or "").partition(".")[0]
        if package in _MOVE_PARAMETERS:
            return hook

        def heard(*args: Any, **kwargs: Any) -> Any:
            answer = hook(*args, **kwargs)
            silent = answer is None and self._answers.get((module, key), True)
            self._answers[module, key] = silent
            return answer

        return heard

    def side_effects(self) -> SideEffects:
        """What the run has left, if it is over."""
        changed = [
            (module, name)
            for module, before in self._before
            for name in {*before, *vars(module)} - OWN
            if differs(vars(module).get(name, ABSENT), *before.get(name, (ABSENT, ABSENT)))
        ]
        altered = {
            id(module) for module, _ in changed
        }  # a hook before a forward may set its weight
        onlookers = (
            (module, key)
            for (module, key), silent in self._answers.items()
            if silent and (key in module._forward_hooks or id(module) not in altered)
        )
        drew = self._dice.moved()
        return SideEffects(
            tuple(changed), tuple(onlookers), drew, self._generators() if drew else ()
        )

    def imprint(self, side_effects: SideEffects) -> Imprint:
        """These attributes as they were before the run."""
        made = Imprint(
            side_effects._replace(attributes=()), self._dice if side_effects.draws else None
        )
        old = {
            (id(holder), name): copy
            for holder, before in self._before
            for name, (_, copy) in before.items()
        }
        made._values = [
            (m, name, _kept(old.get((id(m), name), ABSENT))) for m, name in side_effects.attributes
        ]
        return made


def holders(block: nn.Module) -> list[Any]:
    """A block's modules, and the objects that these hold: by themselves, or in containers."""
    modules = list(block.modules())
    if any(map(_moves_parameters, modules)):
        return []
    found: dict[int, Any] = {id(module): module for module in modules}
    for holder in modules:
        _add_held(vars(holder), found, depth=1)
    return list(found.values())


def _add_held(held: dict[str, Any], found: dict[int, Any], depth: int) -> None:
    for name, value in held.items():
        if name in OWN or isinstance(value, _LEAVES):
            continue
        for item in _items(value):
            if _is_holder(item) and id(item) not in found and len(found) < _MOST_HOLDERS:
                found[id(item)] = item
                if depth:
                    _add_held(vars(item), found, depth - 1)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, _CONTAINERS):
        few = value.values() if isinstance(value, dict) else value
        return list(few) if len(value) <= _MOST_ITEMS else ()
    return (value,)


_LEAVES = (bool, int, float, str, type(None), torch.Tensor, tuple, type, FunctionType, ModuleType)


def _is_holder(value: Any) -> bool:
    """Whether it is an object of somebody's own class, which keeps what it has in a `__dict__`."""
    if isinstance(value, (*_LEAVES, nn.Module, *_CONTAINERS, *GENERATORS, np.ndarray)):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _NOT_LOOKED_AT and isinstance(getattr(value, "__dict__", None), dict)


@contextmanager
def _without(onlookers: tuple[Hook, ...]) -> Iterator[None]:
    """Hooks that only look on are not called."""
    if not onlookers:
        yield
        return
    modules = {module for module, _ in onlookers}
    with _hooks(modules, lambda m, key, hook: None if (m, key) in onlookers else hook):
        yield


@contextmanager
def _hooks(modules: Iterable[nn.Module], change: Callable[..., Any]) -> Iterator[None]:
    """What `change` makes of each forward hook is in its place; None: it is not called."""
    originals = [
        (module, kind, hooks)
        for module in modules
        for kind in ("_forward_hooks", "_forward_pre_hooks")
        if (hooks := getattr(module, kind))
    ]
    for module, kind, hooks in originals:
        changed = [(key, change(module, key, hook)) for key, hook in hooks.items()]
        present = OrderedDict((key, hook) for key, hook in changed if hook is not None)
        vars(module)[kind] = present
    try:
        yield
    finally:
        for module, kind, hooks in originals:
            vars(module)[kind] = hooks


def _moves_parameters(module: nn.Module) -> bool:
    """Whether it is a wrapper that exchanges parameters as it goes along: FSDP1, ZeRO."""
    return type(module).__module__.startswith(_WRAPPERS)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 has put it there: a view of the parameter that it keeps flat."""
    return getattr(tensor._base, "_is_flat_param", False)


def differs(now: Any, was: Any, copy: Any) -> bool:
    """Whether an attribute is another one, or a container with other things in it."""
    if now is not was:
        return not (
            isinstance(now, (bool, int, float, str)) and type(now) is type(was) and now == was
        )
    return not like(now, copy)


def like(now: Any, copy: Any) -> bool:
    """Whether something is what it was when it was copied."""
    if now is copy:
        return True
    if type(now) is not type(copy):
        return False
    if isinstance(now, torch.Tensor):
        return now.shape == copy.shape and now.dtype == copy.dtype and torch.equal(now, copy)
    if isinstance(now, np.ndarray):
        return np.array_equal(now, copy)
    if isinstance(now, dict):
        return now.keys() == copy.keys() and all(like(v, copy[k]) for k, v in now.items())
    if isinstance(now, set):
        return len(now) == len(copy) and all(a is b for a, b in zip(now, copy, strict=True))
    if isinstance(now, (list, deque)):
        return len(now) == len(copy) and all(map(like, now, copy))
    return False


def _kept(value: Any) -> Any:
    """A value to find again: without the graph behind it, and nothing large."""
    return copied(value, graph=False)


def copied(value: Any, *, graph: bool = True, tensors: bool = True, depth: int = 3) -> Any:
    """What a forward may change in place is copied: containers with what is in them, and small
    tensors without a graph. Those with one are themselves, or without it: what follows from them
    has a graph all the same, as in the forward."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            if graph or isinstance(value, nn.Parameter):
                return value
            small = value.nbytes <= _MOST_BYTES
            return value.detach().requires_grad_() if small else _AS_IT_IS
        if not tensors:
            return value
        return value.clone() if can_be_compared(value) else value
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= _MOST_BYTES else value
    if kind not in _CONTAINERS:
        return value
    made = value.copy()
    if kind is set or not depth or len(value) > _MOST_ITEMS:
        return made
    for at, item in value.items() if isinstance(value, dict) else enumerate(value):
        made[at] = copied(item, graph=graph, tensors=tensors, depth=depth - 1)
    return made


def can_be_compared(tensor: torch.Tensor) -> bool:
    """Whether it is small, and no sparse, nested or other special one."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    special = tensor.is_nested or tensor.is_meta or tensor.is_inference()
    return plain and not special and tensor.nbytes <= _MOST_BYTES


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
