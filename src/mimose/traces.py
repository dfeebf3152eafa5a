"""What a forward leaves on its modules besides buffers: state, stored losses, collected features.

In the forward all of it is wanted. A recompute would leave it a second time: a state would advance
twice, a list would grow, and a tensor stored on a module would hold the rebuilt graph with all its
activations. So a recompute finds attributes as its forward found them, runs no hook that only
looks on, and afterwards all is as before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mimose.dice import GENERATORS, Dice, Generator
from mimose.trees import local

Place = tuple[nn.Module, str]
"""A module and the name of one of its attributes."""
Hook = tuple[nn.Module, int]
"""A module and the number of one of its forward hooks."""

_ABSENT = object()
_AS_IT_IS = object()
"""Stands for a value that is not kept: the recompute finds what is there then."""
_MOST_BYTES = 1 << 20
"""Larger values are neither kept nor compared."""
_MOST_ITEMS = 1000
"""Of longer containers the items are not copied."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_OWN = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""What every module has: no forward changes that."""
_MOVE_PARAMETERS = frozenset({"torch", "deepspeed", "accelerate", "fairscale", "mimose"})
"""Packages whose hooks do more than look on: a recompute needs them."""
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


class Traces(NamedTuple):
    """What a block's first run has changed on its modules, and which hooks only looked on."""

    attributes: tuple[Place, ...] = ()
    onlookers: tuple[Hook, ...] = ()
    draws: bool = False
    """Whether it throws other dice than torch's."""
    generators: tuple[Generator, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.attributes or self.onlookers or self.draws)


class Imprint:
    """Attributes at one moment, before a forward; `run` its recompute under them."""

    __slots__ = ("_dice", "_onlookers", "_values")

    def __init__(self, traces: Traces, dice: Dice | None = None) -> None:
        self._dice = dice or (Dice(traces.generators) if traces.draws else None)
        self._onlookers = traces.onlookers
        self._values = [
            (module, name, _kept(vars(module).get(name, _ABSENT)))
            for module, name in traces.attributes
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with the attributes as they were, and leave them as they are."""
        present = [
            (module, name, vars(module).get(name, _ABSENT)) for module, name, _ in self._values
        ]
        try:
            for module, name, value in self._values:
                if value is not _AS_IT_IS:
                    _put(module, name, _copied(value))
            with _without(self._onlookers):
                return function(*args) if self._dice is None else self._dice.run(function, *args)
        finally:
            for module, name, value in present:
                _put(module, name, value)


class FirstLook:
    """A block before its first run: afterwards, what that has left behind."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        modules = [] if any(map(_moves_parameters, block.modules())) else block.modules()
        self._before = [
            (module, {n: (v, _copied(v)) for n, v in vars(module).items() if n not in _OWN})
            for module in modules
        ]
        self._answers: dict[Hook, bool] = {}
        self._dice = Dice(self._generators())

        frozen = (p for p in block.parameters() if not p.requires_grad)
        small = (p for p in frozen if local(p).nbytes <= _MOST_BYTES)
        self._frozen = [(p, local(p.detach()).clone()) for p in small]

    @property
    def changed_a_parameter(self) -> bool:
        """Whether the run has changed a frozen parameter: a codebook, say."""
        return any(not torch.equal(local(p.detach()), value) for p, value in self._frozen)

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
        modules = [module for module, _ in self._before if module is not self._block]
        hooked = [module for module in modules if module._forward_hooks]
        with _hooks(hooked, self._heard):
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

    def traces(self) -> Traces:
        """What the run has left, if it is over."""
        changed = [
            (module, name)
            for module, before in self._before
            for name in {*before, *vars(module)} - _OWN
            if _differs(vars(module).get(name, _ABSENT), *before.get(name, (_ABSENT, _ABSENT)))
        ]
        onlookers = (hook for hook, silent in self._answers.items() if silent)
        drew = self._dice.moved()
        return Traces(tuple(changed), tuple(onlookers), drew, self._generators() if drew else ())

    def imprint(self, traces: Traces) -> Imprint:
        """These attributes as they were before the run."""
        made = Imprint(traces._replace(attributes=()), self._dice if traces.draws else None)
        old = {
            (module, name): copy
            for module, before in self._before
            for name, (_, copy) in before.items()
        }
        made._values = [
            (m, name, _kept(old.get((m, name), _ABSENT))) for m, name in traces.attributes
        ]
        return made


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
    originals = [(module, module._forward_hooks) for module in modules]
    for module, hooks in originals:
        changed = [(key, change(module, key, hook)) for key, hook in hooks.items()]
        present = OrderedDict((key, hook) for key, hook in changed if hook is not None)
        vars(module)["_forward_hooks"] = present
    try:
        yield
    finally:
        for module, hooks in originals:
            vars(module)["_forward_hooks"] = hooks


def _moves_parameters(module: nn.Module) -> bool:
    """Whether it is a wrapper that exchanges parameters as it goes along: FSDP1, ZeRO."""
    return type(module).__module__.startswith(_WRAPPERS)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 has put it there: a view of the parameter that it keeps flat."""
    return getattr(tensor._base, "_is_flat_param", False)


def _differs(now: Any, was: Any, copy: Any) -> bool:
    """Whether an attribute is another one, or a container with other things in it."""
    if now is not was:
        return not (
            isinstance(now, (bool, int, float, str)) and type(now) is type(was) and now == was
        )
    return not _like(now, copy)


def _like(now: Any, copy: Any) -> bool:
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
        return now.keys() == copy.keys() and all(_like(v, copy[k]) for k, v in now.items())
    if isinstance(now, set):
        return len(now) == len(copy) and all(a is b for a, b in zip(now, copy, strict=True))
    if isinstance(now, (list, deque)):
        return len(now) == len(copy) and all(map(_like, now, copy))
    return False


def _kept(value: Any) -> Any:
    """A value to find again: without the graph behind it, and nothing large."""
    return _copied(value, graph=False)


def _copied(value: Any, *, graph: bool = True, depth: int = 3) -> Any:
    """What a forward may change in place is copied: containers with what is in them, and small
    tensors without a graph. Those with one are themselves, or without it."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            if graph or isinstance(value, nn.Parameter):
                return value
            return value.detach() if value.nbytes <= _MOST_BYTES else _AS_IT_IS
        return value.clone() if _can_be_compared(value) else value
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= _MOST_BYTES else value
    if kind not in _CONTAINERS:
        return value
    made = value.copy()
    if kind is set or not depth or len(value) > _MOST_ITEMS:
        return made
    for at, item in value.items() if isinstance(value, dict) else enumerate(value):
        made[at] = _copied(item, graph=graph, depth=depth - 1)
    return made


def _can_be_compared(tensor: torch.Tensor) -> bool:
    """Whether it is small, and no sparse, nested or other special one."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    special = tensor.is_nested or tensor.is_meta or tensor.is_inference()
    return plain and not special and tensor.nbytes <= _MOST_BYTES


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
