"""Key-value caches among a block's arguments: objects that a block reads and writes.

A recompute must not write to a cache a second time, so it is given a copy of the cache as its
forward found it. In training nobody reads a cache afterwards, as a rule; filled, it would hold the
keys and values of recomputed blocks until the outputs are gone. Then each block is given a copy of
its own, which is gone after its run: all operators run as in plain training, and the cache stays
empty. Where caches are read, they are filled as in plain training.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.errors import warn
from mimose.tensors import tensors_in

_NAMES = frozenset(
    {"past_key_values", "past_key_value", "layer_past", "past", "cache", "cache_params"}
)


def may_take_cache(module: nn.Module) -> bool:
    """Whether a cache may be among the arguments of the module's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # one that shows no signature
        return True
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(name in _NAMES or p.kind in anything for name, p in parameters.items())


def _tells_length_and_grows(kind: Any) -> bool:
    methods = ("get_seq_length", "update")
    return all(callable(getattr(kind, name, None)) for name in methods)


def _holds_part(kind: Any) -> bool:
    return _tells_length_and_grows(kind) or callable(getattr(kind, "reset", None))


is_cache: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_tells_length_and_grows)
"""Whether objects of this class are caches."""
_is_part: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_holds_part)
"""Whether objects of this class, in a cache, hold a part of what is in it: one layer's."""


def copy_of_cache(cache: Any) -> Any:
    """A cache with the same tensors in containers of its own."""
    kind = type(cache)
    if kind is list or kind is tuple:
        return kind([copy_of_cache(item) for item in cache])
    if kind is dict:
        return {key: copy_of_cache(item) for key, item in cache.items()}
    if kind in _LEAVES or not _is_part(kind) or not hasattr(cache, "__dict__"):
        return cache
    made: Any = object.__new__(kind)
    held = made.__dict__ = dict(cache.__dict__)
    for (
        name,
        value,
    ) in held.items():  # every layer's, at every run of a block: as few calls as can be
        if type(value) not in _LEAVES:
            held[name] = copy_of_cache(value)
    return made


_PLAIN = frozenset({int, bool, float, str, type(None), torch.dtype, torch.device})
_LEAVES = _PLAIN | {torch.Tensor}


def tensors_in_cache(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors in a cache, depth first; not those without elements."""
    kind = type(cache)
    if isinstance(cache, torch.Tensor):
        if cache.numel():
            yield cache
    elif kind is list or kind is tuple:
        for item in cache:
            yield from tensors_in_cache(item)
    elif kind is dict:
        for item in cache.values():
            yield from tensors_in_cache(item)
    elif kind not in _LEAVES and _is_part(kind):
        for value in getattr(cache, "__dict__", {}).values():
            yield from tensors_in_cache(value)


def output_tensors(out: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a model returns, those in its caches included."""
    yield from tensors_in(out)
    values = out.values() if isinstance(out, Mapping) else out
    if isinstance(out, (Mapping, tuple, list)):
        for value in values:
            if is_cache(type(value)):
                yield from tensors_in_cache(value)


def _is_empty(value: Any) -> bool:
    """Whether there is nothing in a cache; as `tensors_in_cache` finds none, but faster."""
    kind = type(value)
    if kind is list or kind is tuple:
        return all(map(_is_empty, value))
    if kind is dict:
        return all(map(_is_empty, value.values()))
    if isinstance(value, torch.Tensor):
        return not value.numel()
    if not _is_part(kind):
        return True
    held = getattr(value, "__dict__", {}).values()
    return all(_is_empty(item) for item in held if type(item) not in _PLAIN)


class _Met(NamedTuple):
    """A cache that blocks were given."""

    cache: weakref.ref[Any]
    stack: str
    """The list of the first block that was given it."""
    blocks: set[int]
    filled: bool
    empty: bool
    """Whether nothing was in it when the first block was given it."""


class Given(NamedTuple):
    """A call's arguments as the block gets them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: bool
    """Whether a cache among them is the model's own, which a second run would write to again."""


class CacheUse:
    """Whether the caches that one model gives its blocks are read, and so have to be filled.

    They are filled in the first forward. If none is given to a second list of blocks there, nor to
    one block twice, nobody is taken to read them, and they stay empty from then on.
    """

    def __init__(self) -> None:
        self._read = False
        self._in_first_forward = True
        self._asked_for = False
        self._first_block: int | None = None
        self._met: dict[int, _Met] = {}

    def forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model's own forward is called; one that is given a cache, or asked for one, fills
        it."""
        asked = kwargs.get("use_cache") is True
        self._asked_for = asked or any(is_cache(type(v)) for v in (*args, *kwargs.values()))

    def given(self, index: int, stack: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """What this block, of this list, is given in place of these arguments."""
        caches = [value for value in (*args, *kwargs.values()) if is_cache(type(value))]
        if not caches:
            return Given(args, kwargs, bound=False)
        empty = [cache for cache in caches if self._meet(cache, index, stack).empty]
        if self._fills:
            return Given(args, kwargs, bound=True)
        own = {id(cache): copy_of_cache(cache) for cache in empty}
        if own:
            args = tuple([own.get(id(value), value) for value in args])
            kwargs = {name: own.get(id(value), value) for name, value in kwargs.items()}
        return Given(args, kwargs, bound=len(own) < len(caches))

    @property
    def in_use(self) -> bool:
        """Whether blocks were given a cache."""
        return self._first_block is not None

    @property
    def _fills(self) -> bool:
        return self._read or self._in_first_forward or self._asked_for

    def _meet(self, cache: Any, index: int, stack: str) -> _Met:
        met = self._met.get(id(cache))
        if met is None or met.cache() is not cache:
            if self._first_block is None:
                self._first_block = index
            elif index == self._first_block:
                self._in_first_forward = False
            self._met = {key: met for key, met in self._met.items() if met.cache() is not None}
            known = _Met(weakref.ref(cache), stack, {index}, self._fills, _is_empty(cache))
            self._met[id(cache)] = known
            return known
        if not self._read and (index in met.blocks or stack != met.stack):
            self._read = True
            if not met.filled:
                warn(_UNFILLED)
        met.blocks.add(index)
        return met


_UNFILLED = (
    "a key-value cache is read by a second block, which no cache was before: it had been left "
    "empty, so that this forward's result is another than in plain training. Caches are filled "
    "from now on; call the model with use_cache=True to have them filled at once"
)
